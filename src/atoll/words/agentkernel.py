"""agentkernel's vocabulary: names, paths and environments as it takes them, and how core's values look in its words."""

import re
import time
import uuid
from collections.abc import Mapping

from atoll import errors
from atoll.model import CommandInfo, SandboxInfo, check_env

NAME = re.compile(r"[A-Za-z0-9](?:[-_]?[A-Za-z0-9])*\Z")
IMAGE = re.compile(r"[A-Za-z0-9._/:@-]{1,256}\Z")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
STATES = {"running": "running", "paused": "paused", "stopped": "stopped", "creating": "running"}


def sandbox_name(text: str) -> str:
    if not 0 < len(text) <= 63 or not NAME.match(text):
        raise errors.InvalidArgument(
            f"Invalid sandbox name {text!r:.80}", hint="1 to 63 letters and digits, with single - or _ between them"
        )
    return text


def image_name(text: str) -> str:
    if not IMAGE.match(text):
        raise errors.InvalidArgument(f"Invalid image {text!r:.80}")
    return text


def environment(given: dict[str, str] | list[str] | None) -> dict[str, str]:
    """`{K: V}` or `["K=V"]`."""
    if isinstance(given, list):
        pairs = {}
        for entry in given:
            key, equals, value = entry.partition("=")
            if not equals or not key:
                raise errors.InvalidArgument(f"env needs K=V, not {entry!r:.80}")
            pairs[key] = value
        given = pairs
    try:
        check_env(given or {})
    except ValueError as bad:
        raise errors.InvalidArgument(str(bad)) from None
    return given or {}


def duration(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhd])", text)
    if found is None or not float(found[1]):
        raise errors.InvalidArgument(f"by needs a duration such as 30m or 1h, not {text!r:.40}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def file_path(text: str) -> str:
    """An absolute path that names a file of the sandbox, not of its kernel."""
    path = "/" + text.lstrip("/")
    parts = [part for part in path.split("/") if part]
    if not parts or ".." in parts or "\0" in path or parts[0] in ("proc", "sys", "dev"):
        raise errors.InvalidArgument(f"Invalid path {text!r:.120}")
    return path


def moment(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def to_uuid(sandbox: str) -> str:
    """The same id in the form of a UUID, and back: its hundred bits with the marks of version 8 among them."""
    value = 0
    for letter in sandbox:
        value = value << 5 | _ALPHABET.index(letter)
    digits = f"{value:025x}"
    return str(uuid.UUID(digits[:12] + "8" + digits[12:15] + "a" + digits[15:] + "00000"))


def from_uuid(text: str) -> str:
    try:
        digits = uuid.UUID(text).hex
    except ValueError:
        raise errors.NotFound("Sandbox not found") from None
    value = int(digits[:12] + digits[13:16] + digits[17:27], 16)
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(95, -1, -5))


def sandbox(info: SandboxInfo) -> Mapping[str, object]:
    limits = {name: held["value"] for name, held in info.limits.items()}
    return {
        "name": info.name or info.id,
        "uuid": to_uuid(info.id),
        "status": STATES.get(info.state, "stopped"),
        "backend": info.runtime,
        "image": info.image,
        "vcpus": max(1, int(limits.get("cpus") or 1)),
        "memory_mb": limits.get("memory_mb"),
        "created_at": moment(info.created_at),
        "expires_at": moment(info.expires_at),
    }


def detached(name: str, info: CommandInfo) -> Mapping[str, object]:
    status = {"running": "running", "completed": "completed"}.get(info.status, "failed")
    if status == "completed" and info.exit_code:
        status = "failed"
    return {
        "id": info.command_id,
        "sandbox": name,
        "command": info.argv,
        "pid": info.pid or 0,
        "status": status,
        "exit_code": info.exit_code,
        "started_at": moment(info.started_at),
    }
