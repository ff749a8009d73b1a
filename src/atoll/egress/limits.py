"""How much the broker may hold for one sandbox and for all: the operator's `[egress.limits]`, with its defaults."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from atoll.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Limits:
    """Each is for one sandbox; `all_` for all of them together."""

    connections: int = 2048
    all_connections: int = 16384
    early_mb: int = 4  # bytes that came before the connection was allowed or its request was complete
    all_early_mb: int = 64
    buffers_mb: int = 16  # bytes that a slow receiver has not taken yet
    all_buffers_mb: int = 128
    elements: int = 4096  # opened addresses and ports in the router's rules

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Limits":
        """Limits from a table of the config; InvalidArgument names the first bad entry."""
        known = [field.name for field in fields(cls)]
        for key, value in table.items():
            if key not in known:
                raise InvalidArgument(
                    f"config.toml: unknown key `egress.limits.{key}`", hint="known are " + ", ".join(known)
                )
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"config.toml: `egress.limits.{key}` is a number from 1 up")
        return cls(**table)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def caps(self) -> dict[str, dict[str, int]]:
        """The caps of one sandbox in the form `accounts.Accounts` takes. Those of all leave each sandbox a few of its own,
        so they are looked at where something is taken."""
        return {"sandbox": {"connections": self.connections, "memory": self.early_mb << 20}}
