"""`--require-approval`: which commands and which writes of a sandbox wait for a person.

    command:GLOB   what is started: the shell text, the code, or the arguments as a shell would write them
    path:GLOB      a file operation from outside that changes such a path
    host:GLOB      a connection from inside to such a name, which the list of hosts has to allow as well

The first two see what a caller asks atoll to do, not what a program inside does by itself: a script that is allowed to start
may run and write anything the sandbox can. Connections are held at the broker, whoever makes them.
"""

import posixpath
import shlex
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from atoll import errors
from atoll.core.access import terminal_presence as presence
from atoll.core.access.principals import Principal
from atoll.egress.policy import held_pattern
from atoll.model import ExecSpec, RunSpec

if TYPE_CHECKING:
    from atoll.core.access.approvals import Approvals
    from atoll.core.sandboxes.state import Live

KINDS = ("command", "path", "host")
CHANGING = frozenset(("mkdir", "remove", "move", "copy", "chmod", "symlink", "sed", "write", "tar_in"))


def check(rules: list[str]) -> None:
    """Refuse at create what could not be held later."""
    for rule in rules:
        kind, colon, glob = rule.partition(":")
        if not colon or kind not in KINDS or not glob.strip() or len(rule) > 1024 or "\0" in rule:
            raise errors.InvalidArgument(f"{rule!r:.120} is no rule", hint="command:GLOB, path:GLOB or host:GLOB")
        if kind == "host":
            held_pattern(glob)


def held_hosts(rules: list[str]) -> list[str]:
    """The patterns of the `host:` rules."""
    return [rule.removeprefix("host:") for rule in rules if rule.startswith("host:")]


class Gate:
    """Holds what a rule names until somebody has decided."""

    def __init__(self, approvals: "Approvals") -> None:
        self._approvals = approvals

    async def command(self, who: Principal, live: "Live", spec: ExecSpec | RunSpec) -> None:
        if who.kind == "local":
            live.callers |= presence.sessions(presence.PEER_PID.get())
        globs = _globs(live, "command")
        text = _text(spec)
        if any(fnmatchcase(text, glob) for glob in globs):
            await self._approvals.require(who, live.id, "command", text)

    async def change(self, who: Principal, live: "Live", op: str, fields: dict[str, Any]) -> None:
        globs = _globs(live, "path")
        if not globs or op not in CHANGING:
            return
        named = [fields[key] for key in ("path", "src", "dst") if fields.get(key)] + list(fields.get("files") or [])
        paths = [_absolute(path) for path in named]
        whole = op == "tar_in" or (op in ("sed", "chmod", "copy", "move", "remove") and bool(paths))
        if any(_touches(path, glob, whole) for path in paths for glob in globs):
            await self._approvals.require(who, live.id, "write", f"{op} {shlex.join(paths)}")


def _globs(live: "Live", kind: str) -> list[str]:
    start = kind + ":"
    return [rule[len(start) :] for rule in live.spec.require_approval if rule.startswith(start)]


def _text(spec: ExecSpec | RunSpec) -> str:
    if isinstance(spec, RunSpec):
        return spec.code
    return spec.command if spec.command is not None else shlex.join(spec.argv or [])


def _absolute(path: str | bytes) -> str:
    text = path.decode("utf-8", "surrogateescape") if isinstance(path, bytes) else path
    return posixpath.normpath(posixpath.join("/workspace", text))


def _touches(path: str, glob: str, whole: bool) -> bool:
    """Whether the path matches, or, where a whole tree is changed, something below it may."""
    if fnmatchcase(path, glob):
        return True
    fixed = glob[: min((glob.find(c) for c in "*?[" if c in glob), default=len(glob))]
    return whole and (path == "/" or fixed.startswith(path + "/"))
