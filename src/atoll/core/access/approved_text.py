"""The text a person approves before a command runs, and the seal that tells whether the same thing runs later.

All of it is shown: the words, the working directory, the user, the environment, stdin. What a terminal would hide is made
visible: control, format and combining characters as escapes, long runs of blanks as their number. Text of the caller never
starts a line of ours: a value with several lines stands below its name, each line behind a bar.
"""

import hashlib
import re
import shlex
import unicodedata
from typing import TYPE_CHECKING

import msgspec

from atoll import errors
from atoll.model import ExecSpec, RunSpec

if TYPE_CHECKING:
    from atoll.core.sandboxes.state import Live

MAX_SHOWN = 16 * 1024  # characters: more than that nobody reads before typing a number
BLANKS = 8  # spaces in a row that are shown as they are; at the start of a line up to INDENT
INDENT = 40
EMPTY_LINES = 2

_ODD = re.compile(rf"[^\x20-\x7e]|[\\⟨⟩]| {{{BLANKS + 1},}}")
_HIDDEN = "CMZ"  # Unicode categories: control and format characters, combining marks, separators
# Variables that make a program run other code than its words say; one that ends with `*` is the start of a name.
STEERING = (
    "PATH", "ENV", "IFS", "BASH_ENV", "BASH_FUNC_*", "BASHOPTS", "SHELLOPTS", "PS4", "PROMPT_COMMAND", "ZDOTDIR", "LD_*",
    "GCONV_PATH", "GLIBC_TUNABLES", "LOCPATH", "NLSPATH", "PYTHON*", "NODE_*", "NPM_CONFIG_*", "PERL*", "RUBY*", "GEM_*",
    "BUNDLE_*", "JAVA_*", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH", "LUA_*", "PHP*", "GIT_*", "SSH_*", "EDITOR",
    "VISUAL", "PAGER", "MANPAGER", "BROWSER", "LESSOPEN", "LESSCLOSE", "HOME", "SHELL", "XDG_CONFIG_*", "PIP_*", "UV_*",
    "CARGO_*", "RUSTC*", "RUSTFLAGS", "GOENV", "GOFLAGS", "GOPATH", "GOPROXY", "GOROOT", "GOTOOLCHAIN",
    "CC", "CXX", "MAKEFLAGS", "MAKEFILES", "DOCKER_*", "DYLD_*",
)  # fmt: skip
HARMLESS = frozenset(
    ("GIT_TERMINAL_PROMPT", "NODE_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUNBUFFERED",
     "PYTHONUTF8")
)  # fmt: skip
_NAMES = frozenset(name for name in STEERING if not name.endswith("*"))
_STARTS = tuple(name[:-1] for name in STEERING if name.endswith("*"))


def visible(text: str) -> str:
    """A line of text in which nothing can hide."""
    start = len(text) - len(text.lstrip(" "))
    if start > INDENT:
        start = 0
    return text[:start] + _ODD.sub(_mark, text[start:])


def _mark(found: re.Match[str]) -> str:
    odd = found[0]
    if odd[0] == " ":
        return f"⟨{len(odd)} spaces⟩"
    if odd not in "\\⟨⟩" and unicodedata.category(odd)[0] not in _HIDDEN:
        return odd
    return odd.encode("unicode_escape").decode() if odd not in "⟨⟩" else f"\\u{ord(odd):04x}"


def steers(name: str) -> bool:
    """Whether a variable of that name decides what runs."""
    return name not in HARMLESS and (name in _NAMES or name.startswith(_STARTS))


def words_of(spec: ExecSpec | RunSpec) -> str:
    """The shell text, the code, or the arguments as a shell would write them."""
    if isinstance(spec, RunSpec):
        return spec.code
    return spec.command if spec.command is not None else shlex.join(spec.argv or [])


def input_of(spec: ExecSpec | RunSpec) -> str:
    """Return the command's stdin, as far as it is known before it runs."""
    return (spec.stdin_bytes() or b"").decode("utf-8", "surrogateescape")


def takes_more_input(spec: ExecSpec | RunSpec) -> bool:
    """Whether the caller can feed it while it runs: nobody knows now what it will do then."""
    return spec.stdin_stream or (isinstance(spec, ExecSpec) and spec.pty is not None)


def describe(live: "Live", spec: ExecSpec | RunSpec) -> str:
    """All that is about to run, in lines for a person; TooLarge when that is more than a person can be asked to read."""
    words = words_of(spec)
    lines = [visible(words)] if "\n" not in words else _block("code" if isinstance(spec, RunSpec) else "command", words)
    if isinstance(spec, RunSpec):
        if spec.language != "bash":
            lines.append(f"language: {visible(spec.language)}")
        if spec.args:
            lines += _block("arguments", shlex.join(spec.args))
    elif spec.user is not None:
        lines.append(f"user: {visible(spec.user)}")
    cwd = spec.cwd or live.spec.workdir
    if cwd != "/workspace":
        lines += _block("working directory", cwd)
    inherited = {name: value for name, value in live.spec.env.items() if steers(name)}
    for name, value in {**inherited, **spec.env}.items():
        lines += _block("environment", f"{name}={value}")
    lines += [f"secret in the environment: {visible(secret.env)}" for secret in live.spec.secrets]
    if spec.stdin_bytes() is not None:
        lines += _block("stdin", input_of(spec))
    if takes_more_input(spec):
        lines.append("stdin: open, the caller sends more while it runs")
    shown = "\n".join(lines)
    if len(shown) > MAX_SHOWN:
        raise errors.TooLarge(
            f"this needs approval, and takes {len(shown)} characters to show: nobody is asked to approve more than {MAX_SHOWN}",
            hint="make the command, its environment and its stdin shorter",
        )
    return shown


def seal(live: "Live", spec: ExecSpec | RunSpec) -> str:
    """A hash of everything that decides what runs, also of what is the same in every command of the sandbox."""
    parts = msgspec.structs.asdict(spec) | {"id": None, "kind": type(spec).__name__}
    given = live.spec
    whole = [live.id, parts, given.workdir, given.env, [msgspec.to_builtins(secret) for secret in given.secrets]]
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.to_builtins(whole))).hexdigest()


def _block(label: str, text: str) -> list[str]:
    if "\n" not in text:
        return [f"{label}: {visible(text)}"]
    lines, empty = [f"{label}:"], 0
    for line in [*text.split("\n"), None]:
        if line is not None and not line.strip(" "):
            empty += 1
            continue
        lines += ["  |"] * empty if empty <= EMPTY_LINES else [f"  ⟨{empty} empty lines⟩"]
        empty = 0
        if line is not None:
            lines.append(f"  | {visible(line)}")
    return lines
