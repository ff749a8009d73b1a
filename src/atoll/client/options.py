"""The options of a new sandbox, and of starting something in one, as types for both SDK faces."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class CreateOptions(TypedDict, total=False):
    """Everything is optional; what is left out is the operator's default."""

    name: str | None
    runtime: str | None
    image: str
    profile: str | None
    mode: str | None
    env: Mapping[str, str] | None
    cpus: float | None
    memory_mb: int | None
    pids: int | None
    files: int | None
    disk_mb: int | None
    shm_mb: int | None
    hosts: Sequence[str] | None
    more_hosts: Sequence[str]
    network: bool
    host_ports: Sequence[int]
    idle_timeout: float | None
    lifetime: float | None
    workdir: str
    labels: Mapping[str, str] | None
    alias: str | None
    mounts: Sequence[Mapping[str, Any]]
    volumes: Sequence[Mapping[str, Any]]
    read_only_root: bool
    persistent: bool
    keep: bool
    secrets: Sequence[Mapping[str, str]]
    require_approval: Sequence[str]


class StartOptions(TypedDict, total=False):
    """How to start a command or code; `user`, `umask` and `merge_stderr` only for commands, `args` only for code."""

    language: str | None
    args: Sequence[str]
    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None
    umask: int | None
    merge_stderr: bool
    stdin: str | bytes | None
    stdin_stream: bool
    timeout: float | None
    output_limit: int | None


def check_create(options: Mapping[str, Any]) -> None:
    """A misspelt option is a TypeError like any other unknown argument."""
    unknown = sorted(set(options) - set(CreateOptions.__annotations__))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}")
