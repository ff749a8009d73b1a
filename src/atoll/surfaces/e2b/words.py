"""The control plane's requests, and how core's values look in its words."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from atoll import errors
from atoll.model import SandboxInfo

ENVD_VERSION = "0.6.13"
RESERVED = "e2b."  # begins the labels that are not the caller's metadata
TEMPLATE, NETWORK = "e2b.template", "e2b.network"
ON_TIMEOUT, AUTO_RESUME = "e2b.on_timeout", "e2b.auto_resume"
MOST_SECONDS = 30 * 86400
CLIENT = "atoll"

Texts = Annotated[list[Annotated[str, Meta(max_length=300)]], Meta(max_length=1000)]
Pairs = dict[str, str]


class _Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """A field this server does not know is an error: what is accepted is applied."""


class AutoResume(_Body, kw_only=True):
    enabled: bool


class NetworkConfig(_Body, kw_only=True, rename="camel"):
    allow_out: Texts | None = None
    deny_out: Texts | None = None
    dns_servers: Texts | None = None
    rules: Any = None
    egress_proxy: Any = None
    allow_public_traffic: bool | None = None
    mask_request_host: str | None = None
    https_ports: list[int] | None = None


class NetworkUpdate(_Body, kw_only=True):
    allowOut: Texts | None = None
    denyOut: Texts | None = None
    dnsServers: Texts | None = None
    rules: Any = None
    egressProxy: Any = None
    allow_internet_access: bool | None = None


class VolumeMount(_Body, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=63)]
    path: Annotated[str, Meta(min_length=1, max_length=4096)]


class NewSandbox(_Body, kw_only=True):
    templateID: Annotated[str, Meta(min_length=1, max_length=256)]
    timeout: int | None = None
    metadata: Pairs | None = None
    envVars: Pairs | None = None
    allow_internet_access: bool | None = None
    network: NetworkConfig | None = None
    autoPause: bool | None = None
    autoPauseMemory: bool | None = None
    autoResume: AutoResume | None = None
    secure: bool | None = None
    volumeMounts: Annotated[list[VolumeMount], Meta(max_length=16)] | None = None
    mcp: Any = None
    iam: Any = None


class Timeout(_Body, kw_only=True):
    timeout: int


class Refresh(_Body, kw_only=True):
    duration: int | None = None


class Connect(_Body, kw_only=True):
    timeout: int | None = None
    memory: bool | None = None


class Resume(_Body, kw_only=True):
    timeout: int | None = None
    autoPause: bool | None = None
    memory: bool | None = None


class Pause(_Body, kw_only=True):
    memory: bool | None = None
    requireHealthyGuest: bool | None = None


class Snapshot(_Body, kw_only=True):
    name: str | None = None
    memory: bool | None = None


def seconds(timeout: int | None, unsaid: int) -> int:
    """Return how long a sandbox is to live, or InvalidArgument."""
    wanted = unsaid if timeout is None else timeout
    if not 0 < wanted <= MOST_SECONDS:
        raise errors.InvalidArgument(f"timeout must be from 1 to {MOST_SECONDS} seconds, not {wanted}")
    return wanted


def moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def metadata_of(info: SandboxInfo) -> Pairs:
    return {key: value for key, value in info.labels.items() if not key.startswith(RESERVED)}


def state_of(info: SandboxInfo) -> str:
    return "running" if info.state in ("running", "creating") else "paused"


def listed(info: SandboxInfo) -> Mapping[str, object]:
    """Return what a list shows of a sandbox."""
    limits = {name: limit["value"] for name, limit in info.limits.items()}
    return {
        "templateID": info.labels[TEMPLATE],
        "sandboxID": info.id,
        "clientID": CLIENT,
        "startedAt": moment(info.created_at),
        "endAt": moment(info.expires_at if info.expires_at is not None else info.last_active),
        "cpuCount": max(1, int(limits.get("cpus") or 1)),
        "memoryMB": int(limits.get("memory_mb") or 0),
        "diskSizeMB": int(limits.get("disk_mb") or 0),
        "state": state_of(info),
        "envdVersion": ENVD_VERSION,
        "metadata": metadata_of(info),
        "volumeMounts": [],
    }


def network_shown(info: SandboxInfo, changed: Mapping[str, object]) -> Mapping[str, object]:
    """Return the network configuration as it was asked for, without what is not set."""
    text = info.labels.get(NETWORK)
    asked: dict[str, object] = msgspec.json.decode(text) if text else {}
    if changed:
        asked = {key: asked[key] for key in ("allowPublicTraffic",) if key in asked} | dict(changed)
    return {key: value for key, value in asked.items() if value is not None}
