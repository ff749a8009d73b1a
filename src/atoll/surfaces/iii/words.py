"""Words of a command without a shell, and URLs of the machine's own services pointed at the sandbox's gateway."""

import re
from collections.abc import Collection

from atoll.egress import HOST_NAME
from atoll.surfaces.iii.failure import EXEC_EXAMPLE, Failure, Patch

BLANK = " \t\r\n"
ESCAPED_IN_QUOTES = '$`"\\\n'


def split(text: str) -> list[str]:
    """POSIX words: quotes and backslashes as in a shell, nothing expanded, `#` a comment only where a word starts."""
    words: list[str] = []
    word: str | None = None
    at, end = 0, len(text)
    while at < end:
        char = text[at]
        at += 1
        if char in BLANK:
            if word is not None:
                words.append(word)
            word = None
        elif char == "#" and word is None:
            line = text.find("\n", at)
            at = end if line < 0 else line
        elif char == "'":
            close = text.find("'", at)
            if close < 0:
                raise _open("single quote")
            word, at = (word or "") + text[at:close], close + 1
        elif char == '"':
            quoted, at = _quoted(text, at)
            word = (word or "") + quoted
        elif char == "\\":
            if at >= end:
                raise _open("backslash at the end")
            if text[at] != "\n":
                word = (word or "") + text[at]
            at += 1
        else:
            word = (word or "") + char
    if word is not None:
        words.append(word)
    return words


def _quoted(text: str, at: int) -> tuple[str, int]:
    found: list[str] = []
    while at < len(text):
        char = text[at]
        if char == '"':
            return "".join(found), at + 1
        if char == "\\" and at + 1 < len(text) and text[at + 1] in ESCAPED_IN_QUOTES:
            at += 1
            char = "" if text[at] == "\n" else text[at]
        found.append(char)
        at += 1
    raise _open("double quote")


def _open(what: str) -> Failure:
    return Failure("S001", f"cmd has an unfinished {what}", note=EXEC_EXAMPLE)


def _as_argv(words: list[str]) -> Patch | None:
    """Return the patch that gives these words as argv alone."""
    found = [word.replace("\0", "") for word in words]
    while found and not found[0]:
        found.pop(0)
    return {"cmd": "", "args": [], "argv": found} if found else None


def command(cmd: str, args: list[str], argv: list[str]) -> list[str]:
    """The three shapes of a command as its argument vector."""
    if argv:
        if cmd or args:
            raise Failure("S001", "argv stands alone, without cmd and args", fix=_as_argv(argv), note=EXEC_EXAMPLE)
        found = argv
    elif any(char in BLANK for char in cmd):
        if args:
            fix = _as_argv([*cmd.split(), *args])
            raise Failure("S001", "cmd with several words takes no args", fix=fix, note=EXEC_EXAMPLE)
        try:
            found = split(cmd)
        except Failure as failure:
            raise Failure("S001", failure.message, fix=_as_argv(cmd.split()), note=EXEC_EXAMPLE) from None
    else:
        found = [cmd, *args]
    if not found or not found[0]:
        fix = _as_argv(found)
        raise Failure("S001", "the command is empty: give cmd or argv", fix=fix, note=EXEC_EXAMPLE)
    if any("\0" in word for word in found):
        raise Failure("S001", "a command must not contain NUL", fix=_as_argv(found), note=EXEC_EXAMPLE)
    return found


DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443, "redis": 6379, "postgres": 5432, "postgresql": 5432,
                 "mysql": 3306, "mongodb": 27017, "amqp": 5672, "nats": 4222}  # fmt: skip
LOCAL_URL = re.compile(
    r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://
        (?P<user>[^\s/?\#,;|"'<>]*@)?
        (?:localhost|127\.0\.0\.1)
        (?::(?P<port>[0-9]{1,5}))?
        (?P<rest>[/?\#][^\s,;|"'<>]*)?""",
    re.X | re.I,
)


def point_at_gateway(env: dict[str, str], allowed: Collection[int]) -> tuple[dict[str, str], list[int]]:
    """Boot environment with localhost URLs pointed at the gateway, and the host ports that must answer there.

    Only a value that is one URL counts, and only with a port from the operator's list: text that merely mentions one of this
    machine's services opens nothing."""
    ports: set[int] = set()
    changed = dict(env)
    for key, value in env.items():
        found = LOCAL_URL.fullmatch(value)
        if found is None:
            continue
        port = int(found["port"]) if found["port"] else DEFAULT_PORTS.get(found["scheme"].lower(), 0)
        if port in allowed:
            ports.add(port)
            changed[key] = _at_gateway(found)
    return changed, sorted(ports)


def _at_gateway(found: re.Match[str]) -> str:
    port = f":{found['port']}" if found["port"] else ""
    return f"{found['scheme']}://{found['user'] or ''}{HOST_NAME}{port}{found['rest'] or ''}"
