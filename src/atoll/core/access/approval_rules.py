"""`--require-approval`: which commands and which writes of a sandbox wait for a person.

    command:GLOB   what is started: the shell text, the code, or the arguments as a shell would write them; also what it
                   finds on stdin, as a whole and line by line, and its words behind its environment
    path:GLOB      a file operation from outside that changes such a path, as it is named or where links lead
    host:GLOB      a connection from inside to such a name, which the list of hosts has to allow as well

The first two see what a caller asks atoll to do, not what a program inside does by itself: a script that is allowed to start
may run and write anything the sandbox can. A command whose words do not say what it will do waits whatever the globs are: one
the caller feeds while it runs, and one with a variable that chooses other code (PATH, BASH_ENV, LD_PRELOAD, ...).
Connections are held at the broker, whoever makes them.
"""

import os
import posixpath
import re
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from atoll import errors
from atoll.core.access import approved_text
from atoll.core.access import terminal_presence as presence
from atoll.core.access.principals import Principal
from atoll.core.files.real_path import real_path
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

    async def command(self, who: Principal, live: "Live", spec: ExecSpec | RunSpec) -> str | None:
        """Wait where a rule says so. The seal of what was approved, for `check`; None when nobody had to decide."""
        if who.kind == "local":
            live.callers |= presence.sessions(presence.PEER_PID.get())
        globs = _globs(live, "command")
        if not globs or not (_unforeseeable(live, spec) or any(fnmatchcase(t, g) for t in _texts(spec) for g in globs)):
            return None
        sealed = approved_text.seal(live, spec)
        await self._approvals.require(who, live.id, "command", approved_text.describe(live, spec), sealed)
        return sealed

    def check(self, live: "Live", spec: ExecSpec | RunSpec, sealed: str | None) -> None:
        """In the moment it runs: PermissionDenied unless this is what was approved."""
        if sealed is not None and sealed != approved_text.seal(live, spec):
            raise errors.PermissionDenied("this is not the command that was approved")

    async def change(self, who: Principal, live: "Live", op: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait where a rule says so. Return the request as it was judged: without links, and the agent follows none."""
        globs = _globs(live, "path")
        if not globs or op not in CHANGING:
            return fields
        keys = [key for key in ("path", "src", "dst") if fields.get(key)]
        named = [fields[key] for key in keys] + list(fields.get("files") or [])
        asked = [_absolute(path) for path in named]
        with live.use() as client:  # links are followed by the one who will do it
            real = [[await real_path(client, _joined(path), last=last) for last in (False, True)] for path in named]
        judged = {**fields, "exact": True}
        judged.update((key, found[_follows(op, key, fields)]) for key, found in zip(keys, real, strict=False))
        if fields.get("files"):
            judged["files"] = [found[True] for found in real[len(keys) :]]
        paths = [[path, *(os.fsdecode(one) for one in found)] for path, found in zip(asked, real, strict=True)]
        whole = op == "tar_in" or (op in ("sed", "chmod", "copy", "move", "remove") and bool(paths))
        if not any(_touches(path, glob, whole) for ways in paths for path in ways for glob in globs):
            return judged
        lines = [approved_text.visible(f"{op} {shlex.join(asked)}")]
        for path, found in zip(asked, paths, strict=True):
            for other in dict.fromkeys(found):
                if other != path:
                    lines.append(f"{approved_text.visible(path)} is {approved_text.visible(other)}")
        await self._approvals.require(who, live.id, "write", "\n".join(lines))
        return judged


def _globs(live: "Live", kind: str) -> list[str]:
    start = kind + ":"
    return [rule[len(start) :] for rule in live.spec.require_approval if rule.startswith(start)]


def _unforeseeable(live: "Live", spec: ExecSpec | RunSpec) -> bool:
    """Whether the words of a command do not tell what it runs. A sandbox's own environment was chosen with its rules, that of
    a sub-agent was not."""
    given = {*spec.env, *(live.spec.env if live.parent_id is not None else ())}
    return approved_text.takes_more_input(spec) or any(map(approved_text.steers, given))


def _texts(spec: ExecSpec | RunSpec) -> list[str]:
    words, stdin = approved_text.words_of(spec), approved_text.input_of(spec)
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in spec.env.items())
    found = [words, f"{environment} {words}"] if environment else [words]
    if isinstance(spec, RunSpec) and spec.args:
        found.append(f"{words} {shlex.join(spec.args)}")
    return [*found, stdin, *(line.strip() for line in stdin.split("\n"))] if stdin else found


def _absolute(path: str | bytes) -> str:
    return posixpath.normpath(os.fsdecode(_joined(path))).replace("//", "/")


def _joined(path: str | bytes) -> bytes:
    return posixpath.join(b"/workspace", os.fsencode(path))


def _follows(op: str, key: str, fields: Mapping[str, Any]) -> bool:
    """Whether the operation means what is behind a link of that name, and not the link."""
    if op == "copy":
        return key == "src" and not fields.get("recursive")
    return op in ("sed", "tar_in") or (op in ("write", "chmod") and fields.get("follow", True) is not False)


def _touches(path: str, glob: str, whole: bool) -> bool:
    """Whether the path matches, or, where a whole tree is changed, something below it may."""
    return fnmatchcase(path, glob) or (whole and _may_match(path.rstrip("/") + "/", glob))


def _may_match(start: str, glob: str) -> bool:
    """Whether the glob matches any text that begins like this. Each bit of `reached` is a place in the glob."""
    parts = re.findall(r"\*+|\[!?\]?[^]]*\]|.", glob, re.DOTALL)
    stars = sum(1 << at for at, part in enumerate(parts) if part[0] == "*")
    takes = {
        char: sum(1 << at for at, part in enumerate(parts) if part == char or fnmatchcase(char, part))
        for char in set(start)
    }
    reached = 1
    for char in start:
        reached |= (reached & stars) << 1
        reached = (reached & takes[char]) << 1 | (reached & stars)
    return reached > 0
