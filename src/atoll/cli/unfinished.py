"""Whether a piece of code goes on in the next line, so that a block can be typed or piped line by line."""

from __future__ import annotations

import shutil
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_OPEN_ENDED = (b"unexpected end of file", b"unexpected EOF", b"here-document at line")
_GOES_ON = (
    "else",
    "elif",
    "except",
    "finally",
    "case",
)  # a line that begins with one of these belongs to the block before
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_SECONDS = 5


def is_unfinished(language: str, code: str) -> bool:
    """Whether more lines must come before this code can run. Wrong code is not unfinished: whoever runs it says what is wrong."""
    if language == "python":
        return _is_unfinished_python(code)
    return _is_unfinished_node(code) if language == "node" else _is_unfinished_shell(code)


def ends_block(language: str, code: str, line: str) -> bool:
    """Whether a piped line begins something new, so that an indented Python block before it is complete."""
    if language != "python" or line[:1] in ("", " ", "\t", "#", "\n"):
        return False
    word = line.split(None, 1)[0].rstrip(":")
    return word not in _GOES_ON and not _is_unfinished_python(code + "\n")


def _is_unfinished_python(code: str) -> bool:
    import codeop
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return codeop.compile_command(code, "<shell>", "single") is None
    except (SyntaxError, ValueError, OverflowError):
        return False


def _is_unfinished_shell(code: str) -> bool:
    """Ask a shell of this machine, which reads the code and runs nothing of it."""
    if code.endswith("\\") and not code.endswith("\\\\"):
        return True
    program = shutil.which("bash") or shutil.which("sh")
    if program is None:
        return False
    try:
        done = subprocess.run(
            [program, "-n"], input=code.encode("utf-8", "surrogateescape") + b"\n", capture_output=True, env={"LC_ALL": "C"},
            timeout=_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return any(word in done.stderr for word in _OPEN_ENDED)


def _is_unfinished_node(code: str) -> bool:
    """Whether a bracket, a template or a comment is open."""
    expected: list[str] = []
    for token in _marks(code):
        if token in _CLOSES:
            expected.append(_CLOSES[token])
        elif not expected or expected.pop() != token:
            return token == "open"
    return bool(expected)


def _marks(code: str) -> Iterator[str]:
    """Yield the brackets of JavaScript code outside its strings and comments, and `open` for one of those that has no end."""
    at, size = 0, len(code)
    while at < size:
        mark = code[at]
        if mark in "'\"`":
            at += 1
            while at < size and code[at] != mark:
                if mark != "`" and code[at] == "\n":
                    return  # a string that never ends is wrong, not unfinished
                at += 2 if code[at] == "\\" else 1
            if at >= size:
                if mark == "`":
                    yield "open"
                return
        elif code.startswith("//", at):
            end = code.find("\n", at)
            at = size if end < 0 else end
        elif code.startswith("/*", at):
            end = code.find("*/", at)
            if end < 0:
                yield "open"
                return
            at = end + 1
        elif mark in "()[]{}":
            yield mark
        at += 1
