"""The network: hosts a sandbox may reach, and ports of it that answer outside."""

from typing import Annotated

from msgspec import Meta

from atoll.model.fields import Answer, Port, Request


class ChangeHosts(Request, kw_only=True):
    """`hosts` replaces the list ([] is no host); `add` and `remove` change it; none of them restores the default list."""

    hosts: Annotated[list[str], Meta(max_length=1024)] | None = None
    add: Annotated[list[str], Meta(max_length=1024)] = []
    remove: Annotated[list[str], Meta(max_length=1024)] = []

    def __post_init__(self) -> None:
        if self.hosts is not None and (self.add or self.remove):
            raise ValueError("either hosts, or add and remove")


class HostsInfo(Answer, kw_only=True):
    """`network` is `hosts` or `none`; `used` counts connections and bytes per host, `refused` what was not let out."""

    sandbox_id: str
    network: str
    hosts: list[str]
    default: bool
    host_ports: list[int]
    used: dict[str, dict[str, int]]
    refused: int
    open: int


class Expose(Request, kw_only=True):
    port: Port
    host: str = "127.0.0.1"


class Exposure(Answer, kw_only=True):
    """A port inside that answers at `url`; `site_url` is the same under a name of its own, for browsers."""

    sandbox_id: str
    port: int
    host: str
    url: str
    site_url: str
    started_at: float
