"""The bodies of agentkernel's HTTP requests."""

from typing import Annotated

from msgspec import Meta, Struct

from atoll import errors

Command = Annotated[list[str], Meta(min_length=1, max_length=65536)]


class _Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """A field this server does not know is an error: what is accepted is applied."""


class Run(_Body, kw_only=True):
    command: Command
    image: str | None = None
    profile: str | None = None
    fast: bool | None = True
    cwd: str | None = None
    env: dict[str, str] | list[str] | None = None
    timeout_ms: Annotated[int, Meta(ge=0, le=86_400_000)] | None = None
    compatibility_mode: str | None = None
    network: bool | None = None


class Exec(_Body, kw_only=True):
    command: Command
    env: list[str] | dict[str, str] | None = None
    workdir: str | None = None
    cwd: str | None = None
    sudo: bool | None = None
    timeout_ms: Annotated[int, Meta(ge=0, le=86_400_000)] | None = None


class BatchCommand(_Body, kw_only=True):
    command: Command


class Batch(_Body, kw_only=True):
    commands: Annotated[list[BatchCommand], Meta(min_length=1, max_length=64)]


class Create(_Body, kw_only=True):
    name: str
    image: str | None = None
    vcpus: Annotated[float, Meta(ge=0.01, le=1024)] | None = None
    memory_mb: Annotated[int, Meta(ge=8)] | None = None
    profile: str | None = None
    compatibility_mode: str | None = None
    backend: str | None = None
    network: bool | None = None
    source_url: str | None = None
    source_ref: str | None = None
    volumes: list[str] | None = None
    secrets: list[str] | None = None
    secret_files: list[str] | None = None
    ports: list[str] | None = None

    def refuse_unsupported(self) -> None:
        for key in ("source_url", "source_ref", "volumes", "secrets", "secret_files", "ports"):
            if getattr(self, key):
                raise errors.InvalidArgument(f"{key} is not supported by this server")


class WriteFile(_Body, kw_only=True):
    content: str
    encoding: str | None = None


class WriteFiles(_Body, kw_only=True):
    files: Annotated[dict[str, str], Meta(max_length=10_000)]


class ExtendTtl(_Body, kw_only=True):
    by: str


class TakeSnapshot(_Body, kw_only=True):
    sandbox: str
    name: str | None = None


class Restore(_Body, kw_only=True):
    as_name: str | None = None


class Nothing(_Body, kw_only=True):
    pass
