"""The operator's `iii-sandbox` settings: the flat map of the contract, alone in a file or inside an engine's config.yaml."""

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from atoll import errors
from atoll.backends import registry

ENTRY = "iii-sandbox"
PRESETS = {"python": "python3", "node": "node"}  # and the program that tells which image to take
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Meta(ge=0, le=2**53)]

NEW_BLOCK = """\
- name: iii-sandbox
  config:
    auto_install: true
    image_allowlist:
      - python
      - node
    default_idle_timeout_secs: 300
    max_concurrent_sandboxes: 32
    default_cpus: 1
    default_memory_mb: 512
"""


def insecure_registries() -> list[str]:
    """The registries `III_INSECURE_REGISTRIES` of this process allows over plain HTTP: a comma between two."""
    return [name for name in map(str.strip, os.environ.get("III_INSECURE_REGISTRIES", "").split(",")) if name]


class Cap(Struct, frozen=True, kw_only=True):
    """The most one image may ask for; what is absent has no cap."""

    max_cpus: U32 | None = None
    max_memory_mb: U32 | None = None


class Settings(Struct, frozen=True, kw_only=True):
    """Every key of the contract. None: nothing was said, so core's own default holds."""

    auto_install: bool = True
    image_allowlist: list[str] = field(default_factory=lambda: list(PRESETS))
    default_idle_timeout_secs: U64 = 300
    max_concurrent_sandboxes: U32 = 32
    max_concurrent_exec_per_sandbox: U32 = 1
    max_exec_timeout_ms: U64 = 300_000
    default_cpus: Annotated[int, Meta(ge=1, le=255)] | None = None
    default_memory_mb: Annotated[int, Meta(ge=32, le=2**24)] | None = None
    per_image_caps: dict[str, Cap] = field(default_factory=dict)
    custom_images: dict[str, str] = field(default_factory=dict)
    isolation: str = "auto"
    legacy_error_prefix: bool = False
    upload_idle_secs: U64 = 5
    max_lifetime_secs: U64 = 0
    disk_mb: U64 | None = None
    host_ports: Annotated[list[Annotated[int, Meta(ge=1, le=65535)]], Meta(max_length=64)] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.isolation not in registry.names():
            raise ValueError(f"isolation is {registry.in_words()}, not {self.isolation[:64]!r}")

    @property
    def exec_slots(self) -> int:
        return max(1, self.max_concurrent_exec_per_sandbox)

    @property
    def longest_exec_ms(self) -> int:
        return min(max(1, self.max_exec_timeout_ms), 24 * 3600 * 1000)

    def allowed(self) -> list[str]:
        """Names that can be booted: presets first, then the operator's own, each by name; known and allowed."""
        known = [*PRESETS, *sorted(self.custom_images)]
        return [name for name in known if name in self.image_allowlist]


def read(path: Path) -> tuple[Settings, list[str]]:
    """The settings of a file, and warnings about keys nobody knows. What is malformed is an error that names the key."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.InvalidArgument(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise errors.InvalidArgument(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from None
    return parse(_entry(content, str(path)), str(path))


def _entry(content: Any, where: str) -> dict[Any, Any]:
    """The map meant: the entry named iii-sandbox in any list of the file, or the whole file."""
    if content is None:
        return {}
    lists = [content] if isinstance(content, list) else []
    if isinstance(content, dict):
        lists += [value for value in content.values() if isinstance(value, list)]
    for entries in lists:
        for entry in entries:
            if isinstance(entry, dict) and entry.get("name") == ENTRY:
                found = entry.get("config")
                if found is not None and not isinstance(found, dict):
                    raise errors.InvalidArgument(f"{where}: `config` of {ENTRY} must be a map")
                return found or {}
    if not isinstance(content, dict):
        raise errors.InvalidArgument(f"{where}: there is no entry `- name: {ENTRY}`")
    if any(key in content for key in ("workers", "modules")):
        raise errors.InvalidArgument(f"{where}: there is no entry `- name: {ENTRY}`")
    return content


def parse(raw: dict[Any, Any], where: str = "config") -> tuple[Settings, list[str]]:
    if "sandbox" in raw:
        raise errors.InvalidArgument(f"{where}: `sandbox` is the old nested form; put its keys directly below `config`")
    known = {one.name for one in msgspec.structs.fields(Settings)}
    warnings = [f"{where}: unknown key `{key}` is ignored" for key in raw if key not in known]
    for key, value in raw.items():
        if key in known:
            try:
                msgspec.convert({key: value}, Settings)
            except msgspec.ValidationError as error:
                raise errors.InvalidArgument(f"{where}: `{key}`: {error}") from None
    given = {key: value for key, value in raw.items() if key in known}
    given.setdefault("image_allowlist", [])
    settings = msgspec.convert(given, Settings)
    _check_custom(settings, where)
    return settings, warnings


def _check_custom(settings: Settings, where: str) -> None:
    from atoll.images.registry.reference import Reference

    for name, reference in settings.custom_images.items():
        if not name or name in PRESETS:
            raise errors.InvalidArgument(f"{where}: `custom_images`: {name!r} cannot name an image of your own")
        try:
            Reference.parse(reference)
        except errors.AtollError as error:
            raise errors.InvalidArgument(f"{where}: `custom_images.{name}`: {error.message}") from None
