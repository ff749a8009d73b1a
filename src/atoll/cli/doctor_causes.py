"""From checks to causes: what has the same remedy is one line, and what helps most comes first."""

from __future__ import annotations

from .doctor_packages import install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .doctor_machine import Check, Machine


class Cause:
    """One thing to mend: the checks that fail for it, the advice, and the command that `--fix` would run (if any)."""

    def __init__(self, checks: Sequence[Check], fix: str, run: str = "") -> None:
        self.names = [one["name"] for one in checks]
        self.detail = "; ".join(dict.fromkeys(one["detail"] for one in checks))
        self.needed = any(not one.get("optional") for one in checks)
        self.fix = fix
        self.run = run

    def as_json(self) -> dict[str, object]:
        return {"names": self.names, "detail": self.detail, "fix": self.fix, "needed": self.needed}


def causes(checks: Sequence[Check], machine: Machine) -> list[Cause]:
    """Return what is to be mended, problems before notes, and of each what mends most rows first."""
    failing = [one for one in checks if not one["ok"]]
    packaged = [one for one in failing if one.get("_packages")]
    found = []
    if packaged:
        command = install(machine, [name for one in packaged for name in one["_packages"]])
        known = bool(command)
        found.append(
            Cause(packaged, command or "; ".join(one.get("fix", "") for one in packaged), command if known else "")
        )
    groups: dict[str, list[Check]] = {}
    for one in failing:
        if not one.get("_packages"):
            groups.setdefault(one.get("fix") or f"\0{one['name']}", []).append(one)
    found += [Cause(rows, rows[0].get("fix", ""), rows[0].get("_run", "")) for rows in groups.values()]
    return sorted(found, key=lambda cause: (not cause.needed, not cause.fix, -len(cause.names)))


def public(checks: Sequence[Check]) -> list[Check]:
    """Return the checks as they are told, without what only `--fix` needs."""
    return [{key: value for key, value in one.items() if not key.startswith("_")} for one in checks]  # type: ignore[misc]
