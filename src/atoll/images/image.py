"""An image: an ordered stack of directories, and the few settings of its author that atoll honours.

An image's configuration is attacker input. Only the fields below are read; labels, annotations, volumes and everything
else are dropped, so that no image can steer the runtime. A working directory that points at a descriptor or into a
kernel file system is refused (CVE-2024-21626).
"""

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from atoll.errors import ImageError

if TYPE_CHECKING:
    from atoll.images.sources.host import HostImage

Source = Literal["host", "oci", "debian", "built"]

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_STRINGS = 4096
_MAX_STRING_BYTES = 128 << 10
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_USER_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}|[0-9]{1,5}")
_KERNEL_DIRS = ("/proc", "/sys", "/dev")


@dataclass(frozen=True, slots=True)
class Settings:
    """The author's defaults: environment, user, working directory, entrypoint and command."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""  # "", a name, or numbers up to 65535, each with an optional ":group"
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class ImageFields(TypedDict):
    """An image as `image inspect` and the APIs show it."""

    name: str
    digest: str
    source: Source
    platform: str  # empty for the machine's own
    size: int
    created: str
    layers: list[str]
    env: dict[str, str]
    user: str
    workdir: str
    entrypoint: list[str]
    cmd: list[str]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Image:
    """An unpacked image, ready to be stacked. Nothing below `lowers` is ever written."""

    name: str
    digest: str
    lowers: tuple[Path, ...]  # top-most first, as overlayfs wants them
    env: Mapping[str, str]
    user: str
    workdir: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    size: int
    created: str  # RFC 3339, when this machine got it
    source: Source
    platform: str = ""
    notes: tuple[str, ...] = ()  # what unpacking left out or changed

    def to_json(self) -> ImageFields:
        """For `image inspect` and the APIs."""
        return describe(self, self.lowers)


def describe(image: "Image | HostImage", layers: Iterable[Path]) -> ImageFields:
    """Return what is told of an image."""
    return {
        "name": image.name,
        "digest": image.digest,
        "source": image.source,
        "platform": image.platform,
        "size": image.size,
        "created": image.created,
        "layers": [str(path) for path in layers],
        "env": dict(image.env),
        "user": image.user,
        "workdir": image.workdir,
        "entrypoint": list(image.entrypoint),
        "cmd": list(image.cmd),
        "notes": list(image.notes),
    }


@dataclass(frozen=True, slots=True)
class OciConfig:
    """The parts of an OCI image configuration that matter here."""

    architecture: str
    os: str
    diff_ids: tuple[str, ...]
    settings: Settings


def parse_config(raw: bytes) -> OciConfig:
    """Read an image configuration and refuse what cannot be honoured safely."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ImageError("the image's configuration is not valid JSON") from error
    rootfs = value.get("rootfs") if isinstance(value, dict) else None
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or not all(_is_sha256(item) for item in diff_ids):
        raise ImageError(
            "this is not an image with a root file system", hint="it may be a signature, a chart or another artifact"
        )
    config = value.get("config")
    return OciConfig(
        architecture=str(value.get("architecture", "")),
        os=str(value.get("os", "")),
        diff_ids=tuple(diff_ids),
        settings=parse_settings(config if isinstance(config, dict) else {}),
    )


def parse_settings(config: Mapping[str, Any]) -> Settings:
    """The `config` object of an OCI or Docker image."""
    return Settings(
        env=_environment(_strings(config, "Env")),
        user=check_user(_string(config, "User")),
        workdir=check_workdir(_string(config, "WorkingDir")),
        entrypoint=_strings(config, "Entrypoint"),
        cmd=_strings(config, "Cmd"),
    )


def check_workdir(text: str) -> str:
    """An absolute, plain directory; anything that could name a descriptor or a kernel file is refused."""
    if not text:
        return "/"
    if "\0" in text or len(text) > 4096 or ".." in text.split("/"):
        raise ImageError(f"the image's working directory is not a plain path: {text[:200]!r}")
    path = "/" + posixpath.normpath(text).lstrip("/")
    if path == "/.":
        path = "/"
    if any(path == top or path.startswith(f"{top}/") for top in _KERNEL_DIRS):
        raise ImageError(f"the image's working directory lies in a kernel file system: {path[:200]!r}")
    return path


def check_user(text: str) -> str:
    """`name`, `uid`, each with `:group`; numbers have at most the 65536 ids a sandbox owns."""
    if not text:
        return ""
    parts = text.split(":")
    plain = len(parts) <= 2 and all(_USER_PART.fullmatch(part) for part in parts)
    if not plain or any(part.isdigit() and int(part) > 65534 for part in parts):
        raise ImageError(f"the image's user is not a user of a sandbox: {text[:200]!r}")
    return text


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    env = {"PATH": DEFAULT_PATH}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if equals and _ENV_NAME.fullmatch(name):
            env[name] = value
    return env


def _string(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value or len(value) > _MAX_STRING_BYTES:
        raise ImageError(f"the image's configuration has a {key} that is not text")
    return value


def _strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key)
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > _MAX_STRINGS:
        raise ImageError(f"the image's configuration has a {key} that is not a list")
    for item in items:
        if not isinstance(item, str) or "\0" in item or len(item) > _MAX_STRING_BYTES:
            raise ImageError(f"the image's configuration has a {key} that is not text")
    return tuple(items)


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"sha256:[a-f0-9]{64}", value) is not None
