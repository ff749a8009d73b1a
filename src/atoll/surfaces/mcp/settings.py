"""Choices of the person who opened an MCP server. Requests and models choose only below it."""

from typing import Annotated

from msgspec import Meta

from atoll.core.policy.profiles import OPEN, Ceiling
from atoll.model import Request, Runtime
from atoll.surfaces.mcp.hello import K8E, TOOLSETS


class Settings(Request, kw_only=True):
    """`mode` and `profile`: from the project's file, for agentkernel's tools. `project`: the directory whose files its
    modes may show to a sandbox, read-only."""

    toolset: str = K8E
    tenant: Annotated[str, Meta(max_length=63)] = ""
    runtime: Runtime = "auto"
    any_host: bool = False
    allow_host_access: bool = False
    mode: str | None = None
    profile: str | None = None
    project: Annotated[str, Meta(max_length=4096)] | None = None

    def __post_init__(self) -> None:
        if self.toolset not in TOOLSETS:
            raise ValueError("toolset must be one of " + ", ".join(TOOLSETS))

    @property
    def ceiling(self) -> Ceiling:
        return OPEN if self.allow_host_access else Ceiling(any_host=self.any_host)


class OpenHttp(Settings, kw_only=True):
    """Serve MCP over HTTP for as long as this request stays open."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8811
