"""Security profiles and compatibility modes: the two tables, and the one rule by which they are combined.

A profile says how a sandbox is walled in; a mode is a profile with a list of hosts for one coding agent. Order of the merge:
the mode's row (native when there is none), then a profile named explicitly, then single keys, then `no_network`, which
nothing undoes. `docs/policy.md` tells it to people; this file is what happens. Light: the command line imports it.
"""

from __future__ import annotations

from .errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, TypedDict

    class Profile(TypedDict):
        network: bool
        mount_cwd: bool
        mount_home: bool
        pass_env: bool
        read_only: bool
        memory_mb: int | None
        cpus: float | None
        capabilities: str
        seccomp: str

    class Mode(TypedDict):
        """The isolation it starts from, whether the project is mounted, its seccomp filter, what it adds to the environment."""

        base: str
        mount_cwd: bool
        seccomp: str
        env: dict[str, str]


NATIVE = "native"
DEFAULT = "moderate"
CUSTOM = "custom"

PROFILES: dict[str, Profile] = {
    "permissive": {
        "network": True, "mount_cwd": True, "mount_home": True, "pass_env": True, "read_only": False,
        "memory_mb": None, "cpus": None, "capabilities": "minimal", "seccomp": "default",
    },
    "moderate": {
        "network": True, "mount_cwd": False, "mount_home": False, "pass_env": False, "read_only": False,
        "memory_mb": 512, "cpus": 1.0, "capabilities": "minimal", "seccomp": "moderate",
    },
    "restrictive": {
        "network": False, "mount_cwd": False, "mount_home": False, "pass_env": False, "read_only": True,
        "memory_mb": 256, "cpus": 0.5, "capabilities": "none", "seccomp": "restrictive",
    },
}  # fmt: skip

MODES: dict[str, Mode] = {
    "native": {"base": "moderate", "mount_cwd": False, "seccomp": "moderate", "env": {}},
    "claude": {
        "base": "moderate", "mount_cwd": True, "seccomp": "ai-agent", "env": {"CLAUDE_CODE_SANDBOX": "agentkernel"},
    },
    "codex": {"base": "restrictive", "mount_cwd": True, "seccomp": "ai-agent", "env": {}},
    "gemini": {"base": "moderate", "mount_cwd": True, "seccomp": "ai-agent", "env": {}},
}  # fmt: skip

MODE_NAMES = {
    "native": "native", "default": "native", "claude": "claude", "claude-code": "claude", "claudecode": "claude",
    "codex": "codex", "openai-codex": "codex", "gemini": "gemini", "gemini-cli": "gemini",
}  # fmt: skip
SECCOMP = ("default", "moderate", "restrictive", "ai-agent")
KEYS = ("network", "mount_cwd", "mount_home", "pass_env", "read_only", "seccomp")
# The fields of a mode that a named profile replaces. Network and the project's mount stay the mode's, but for restrictive.
_ISOLATION = ("mount_home", "pass_env", "read_only", "memory_mb", "cpus", "capabilities", "seccomp")


class Policy:
    """The permissions of one sandbox, all inputs combined."""

    __slots__ = (
        "capabilities", "cpus", "env", "memory_mb", "mode", "mount_cwd", "mount_home", "network", "pass_env", "profile",
        "read_only", "seccomp",
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        for name in self.__slots__:
            setattr(self, name, values[name])

    mode: str | None
    profile: str
    network: bool
    mount_cwd: bool
    mount_home: bool
    pass_env: bool
    read_only: bool
    memory_mb: int | None
    cpus: float | None
    capabilities: str
    seccomp: str
    env: dict[str, str]

    def shown(self) -> Mapping[str, object]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "env"}


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word a misspelt one most likely means, as the end of an error's sentence."""
    from difflib import get_close_matches

    names = list(known)
    found = get_close_matches(word, names, 1, 0.5)
    return f"did you mean `{found[0]}`?" if found else "one of " + ", ".join(names)


def profile_name(text: str) -> str:
    """A profile's name, checked."""
    if text not in (*PROFILES, CUSTOM):
        raise InvalidArgument(f"unknown profile {text!r:.60}", hint=nearest(text, (*PROFILES, CUSTOM)))
    return text


def mode_name(text: str) -> str:
    """A mode's one name behind all its spellings."""
    name = MODE_NAMES.get(text)
    if name is None:
        raise InvalidArgument(f"unknown compatibility mode {text!r:.60}", hint=nearest(text, MODES))
    return name


def seccomp_name(text: str) -> str:
    if text not in SECCOMP:
        hint = "atoll loads no filter from a file" if "/" in text or "." in text else nearest(text, SECCOMP)
        raise InvalidArgument(f"unknown seccomp profile {text!r:.60}", hint=hint)
    return text


def merge(
    *,
    mode: str | None = None,
    profile: str | None = None,
    keys: Mapping[str, Any] | None = None,
    no_network: bool = False,
) -> Policy:
    """The policy these add up to. `keys` are the single settings of a `[security]` block."""
    mode = None if mode is None else mode_name(mode)
    row = MODES[mode or NATIVE]
    values: dict[str, Any] = {**PROFILES[row["base"]]}
    values.update(network=True, mount_cwd=row["mount_cwd"], seccomp=row["seccomp"])
    if profile is not None:
        named: Mapping[str, Any] = PROFILES[DEFAULT if profile_name(profile) == CUSTOM else profile]
        values.update({key: named[key] for key in _ISOLATION})
        if not named["network"]:
            values.update(network=False, mount_cwd=False)
        elif named["mount_cwd"]:
            values["mount_cwd"] = True
    for key, value in (keys or {}).items():
        values[key] = _checked(key, value)
    if no_network:
        values["network"] = False
    return Policy(mode=mode, profile=profile or row["base"], env=dict(row["env"]), **values)


def _checked(key: str, value: Any) -> Any:
    if key not in KEYS:
        raise InvalidArgument(f"unknown security key {key!r:.60}", hint=nearest(key, KEYS))
    if key == "seccomp":
        if not isinstance(value, str):
            raise InvalidArgument("seccomp must be a name", hint="one of " + ", ".join(SECCOMP))
        return seccomp_name(value)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{key} must be true or false, not {value!r:.60}")
    return value
