"""A project's own file: `atoll.toml` or `agentkernel.toml`, read, checked, and kept from taking more than it may.

A file that is merely found in the working directory came with the project, so it may choose a mode, moderate or restrictive,
and a mount of the project. It may not undo a flag, and it may not ask for permissive, the home directory, the caller's
environment, keys, or files outside its directory: those need `--config FILE` from a person.
"""

from __future__ import annotations

import os

from atoll.cli.output import say
from atoll.errors import InvalidArgument, PermissionDenied
from atoll.profiles import KEYS, NATIVE, mode_name, nearest, profile_name, seccomp_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypeAlias

    Keys: TypeAlias = Mapping[str, bool | str]  # single settings of a `[security]` block

NAMES = ("atoll.toml", "agentkernel.toml")
MAX_BYTES = 1 << 20

_TEXT, _NUMBER, _FLAG, _TEXTS, _TABLE = "text", "a whole number", "true or false", "a list of texts", "a table"
SECTIONS: dict[str, dict[str, str]] = {
    "sandbox": {"name": _TEXT, "runtime": _TEXT, "base_image": _TEXT},
    "agent": {"preferred": _TEXT, "compatibility_mode": _TEXT},
    "resources": {"vcpus": "a number", "memory_mb": _NUMBER},
    "network": {"ports": _TEXTS, "vsock_cid": _NUMBER},
    "security": {
        "profile": _TEXT, "network": _FLAG, "mount_cwd": _FLAG, "mount_home": _FLAG, "pass_env": _FLAG,
        "read_only": _FLAG, "seccomp": _TEXT, "domains": _TABLE, "commands": _TABLE,
    },
    "security.domains": {"allow": _TEXTS, "block": _TEXTS, "allowlist_only": _FLAG},
    "security.commands": {"allow": _TEXTS, "block": _TEXTS, "allowlist_only": _FLAG},
    "api": {"api_key": _TEXT, "api_key_env": _TEXT, "allow_sudo_exec": _FLAG},
    "build": {"dockerfile": _TEXT, "context": _TEXT, "target": _TEXT, "no_cache": _FLAG, "args": _TABLE},
    "files": {"source": _TEXT, "dest": _TEXT, "mode": _TEXT},
    "daemon": {"min_warm": _NUMBER, "max_warm": _NUMBER, "agents": _TABLE},
}  # fmt: skip
UNSUPPORTED = ("secrets", "ssh", "orchestrator", "enterprise", "remote", "schedule", "proxy")
_KINDS: dict[str, type] = {_TEXT: str, _FLAG: bool, _TABLE: dict}


class Project:
    """The values of one file. `found`: nobody named it, it was just there."""

    def __init__(self, path: str, data: Mapping[str, Any], found: bool) -> None:
        self.path = path
        self.directory = os.path.dirname(path)
        self.data = data
        self.found = found

    def get(self, section: str, key: str) -> Any:
        value: Any = self.data
        for part in section.split("."):
            value = value.get(part) or {}
        return value.get(key)

    @property
    def mode(self) -> str | None:
        text = self.get("agent", "compatibility_mode")
        return None if text is None else mode_name(text)

    @property
    def profile(self) -> str | None:
        text = self.get("security", "profile")
        return None if text is None else profile_name(text)

    @property
    def keys(self) -> Keys:
        """The single settings of `[security]` that are given."""
        return {key: self.get("security", key) for key in KEYS if self.get("security", key) is not None}

    @property
    def ports(self) -> list[str]:
        """Return the ports to publish. A file that was only found publishes none."""
        return [] if self.found else list(self.get("network", "ports") or [])

    def check_command(self, argv: list[str]) -> None:
        """`[security.commands]`: advice against accidents; a shell gets around it."""
        words = {argv[0], os.path.basename(argv[0])}
        allow, block = self.get("security.commands", "allow") or [], self.get("security.commands", "block") or []
        listed = not self.get("security.commands", "allowlist_only") or bool(words & set(allow))
        if words & set(block) or not listed:
            raise PermissionDenied(f"{argv[0]!r:.120} is not allowed by [security.commands] of {self.path}")

    def files(self) -> list[Mapping[str, object]]:
        """`[[files]]` as the daemon takes them."""
        from atoll.client.codec import to_base64

        made: list[Mapping[str, object]] = []
        for entry in self.data.get("files") or []:
            source, dest = self._source(entry), entry.get("dest")
            if not isinstance(dest, str) or not dest.startswith("/") or ".." in dest.split("/"):
                raise InvalidArgument(f"{self.path}: a file's dest must be an absolute path, not {dest!r:.120}")
            try:
                mode = int(entry.get("mode") or "0644", 8)
                with open(source, "rb") as file:
                    content = file.read()
            except ValueError:
                raise InvalidArgument(f"{self.path}: mode {entry.get('mode')!r:.40} is not octal") from None
            except OSError as failure:
                raise InvalidArgument(f"{self.path}: {source}: {failure.strerror}") from None
            made.append({"path": dest, "content_b64": to_base64(content), "mode": mode & 0o7777})
        return made

    def _source(self, entry: Mapping[str, object]) -> str:
        source = entry.get("source")
        if not isinstance(source, str) or not source:
            raise InvalidArgument(f"{self.path}: an entry of [[files]] needs a source")
        place = os.path.realpath(os.path.join(self.directory, source))
        inside = os.path.realpath(self.directory)
        if self.found and os.path.commonpath((place, inside)) != inside:
            raise _too_much(self.path, f"the file {source!r:.120} outside its directory")
        return place


def find(config: str | None, directory: str) -> Project | None:
    """The file named with --config, else one of the two names in the directory, else None."""
    if config is not None:
        return _read(os.path.abspath(config), found=False)
    for name in NAMES:
        path = os.path.join(directory, name)
        if os.path.lexists(path):
            return _read(path, found=True)
    return None


def _read(path: str, found: bool) -> Project:
    import stat
    import tomllib

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidArgument(f"{path} is not a plain file")
            raw = file.read(MAX_BYTES + 1)
    except OSError as failure:
        raise InvalidArgument(f"{path}: {failure.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InvalidArgument(f"{path} is larger than {MAX_BYTES} bytes")
    try:
        data = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as bad:
        raise InvalidArgument(f"{path}: {bad}") from None
    own = os.path.basename(path) == "atoll.toml"
    _check(path, data, own)
    project = Project(path, data, found)
    _check_values(project)
    if found:
        _refuse_too_much(project)
    return project


def _check(path: str, data: Mapping[str, object], own: bool) -> None:
    """Every key and kind. Unknown ones are errors in atoll's own file and in security blocks, else a warning."""
    for section, value in data.items():
        if section in UNSUPPORTED:
            say(f"Warning: {path}: [{section}] is not supported")
        elif section not in SECTIONS or (section == "files" and not isinstance(value, list)):
            _unknown(path, f"[{section}]", nearest(section, [name for name in SECTIONS if "." not in name]), own)
        else:
            for entry in value if isinstance(value, list) else [value]:
                _check_section(path, section, entry, own)


def _check_section(path: str, section: str, value: Any, own: bool) -> None:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path}: [{section}] must be a table")
    known = SECTIONS[section]
    for key, item in value.items():
        if key not in known:
            strict = own or section.startswith("security")
            _unknown(path, f"{section}.{key}", nearest(key, known), strict)
            continue
        if not _is(item, known[key]):
            raise InvalidArgument(f"{path}: {section}.{key} must be {known[key]}")
        if f"{section}.{key}" in SECTIONS:
            _check_section(path, f"{section}.{key}", item, own)


def _is(value: Any, kind: str) -> bool:
    if kind == _TEXTS:
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if kind in (_NUMBER, "a number"):
        return isinstance(value, int if kind == _NUMBER else (int, float)) and not isinstance(value, bool)
    return isinstance(value, _KINDS[kind])


def _unknown(path: str, what: str, hint: str, strict: bool) -> None:
    if strict:
        raise InvalidArgument(f"{path}: unknown key {what}", hint=hint)
    say(f"Warning: {path}: unknown key {what}; {hint}")


def _check_values(project: Project) -> None:
    """Names that must be known, also where nothing uses them this time; and rules that contradict each other."""
    project.mode, project.profile  # noqa: B018  # reading checks
    if project.get("security", "seccomp") is not None:
        seccomp_name(project.get("security", "seccomp"))
    allow, block = project.get("security.domains", "allow") or [], project.get("security.domains", "block") or []
    for host in sorted(set(allow) & set(block)):
        say(f"Warning: {project.path}: {host} is both allowed and blocked; it stays blocked")
    off = project.get("security", "network") is False or project.profile == "restrictive"
    if project.found and project.get("network", "ports"):
        say(f"Warning: {project.path}: ports are published only for a file that is named with --config")
    if project.data.get("daemon"):
        say(f"Warning: {project.path}: warm sandboxes are set by this machine's operator, in [pool] of config.toml")
    if off and (allow or block):
        say(f"Warning: {project.path}: domain rules without a network do nothing")


def _refuse_too_much(project: Project) -> None:
    from .words import called_agentkernel

    path = project.path
    if project.profile == "permissive":
        raise _too_much(path, "the profile permissive")
    for key in ("mount_home", "pass_env"):
        if project.get("security", key):
            raise _too_much(path, f"`{key}`")
    if project.data.get("api"):
        raise _too_much(path, "`[api]`")
    if not called_agentkernel():
        if project.mode == NATIVE:
            raise _too_much(path, "the mode native, every public host,")
        if "*" in (project.get("security.domains", "allow") or []):
            raise _too_much(path, "every public host")


def _too_much(path: str, what: str) -> PermissionDenied:
    return PermissionDenied(
        f"{path} asks for {what} and was only found here", hint=f"if you trust it: --config {os.path.basename(path)}"
    )
