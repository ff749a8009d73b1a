"""The network: hosts a sandbox may reach, and ports of it that answer outside."""

from typing import Annotated, Literal, TypedDict

from msgspec import Meta, Struct

from atoll.model.fields import Answer, Port, Request


class Policy(Struct, kw_only=True, frozen=True):
    """The network policy of a sandbox, as a value. `none` is no interface at all; `hosts` without a host is one that leads nowhere.

    `private` are networks that the operator opened for a host, `host_ports` loopback ports of the machine, `held` patterns of names
    to which a connection waits until somebody has approved it.
    """

    network: Literal["none", "hosts"] = "none"
    hosts: tuple[str, ...] = ()
    private: dict[str, tuple[str, ...]] = {}
    host_ports: tuple[int, ...] = ()
    held: tuple[str, ...] = ()


class ShownMount(TypedDict):
    source: str
    target: str
    read_only: bool


class Isolation(TypedDict):
    """How a sandbox is walled in, as its profile and mode decided it."""

    profile: str
    mode: str | None
    network: bool
    read_only_root: bool
    capabilities: str
    seccomp: str
    no_new_privileges: bool
    mounts: list[ShownMount]


class StoredPolicy(TypedDict, total=False):
    """A policy as it is stored and shown: the fields of `Policy`, and how it came about."""

    network: Literal["none", "hosts"]
    hosts: list[str]
    private: dict[str, list[str]]
    host_ports: list[int]
    held: list[str]
    default: bool  # the hosts are the operator's list
    enforced: bool
    why: str  # it is not enforced
    isolation: Isolation


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
