"""Words and variables of a Dockerfile: quotes, escapes, `$name`, `${name}`, `${name:-word}` and their kin.

What comes out is bounded: an ARG that doubles itself ends with an error, not with all memory.
"""

import re
from collections.abc import Mapping

from atoll.errors import InvalidArgument

MAX_VALUE = 64 << 10
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATORS = (":-", ":+", ":?", "-", "+", "?")
_DEEPEST = 16


def expand(text: str, env: Mapping[str, str]) -> str:
    """Return the text with its variables' values, quotes taken away."""
    return _Words(text, env).rest()


def words(text: str, env: Mapping[str, str]) -> list[str]:
    """Return the words of a line, split at blanks outside quotes, each with its variables' values."""
    return _Words(text, env).all()


def expand_plain(text: str, env: Mapping[str, str], depth: int = 0) -> str:
    """Return the text with its variables' values; quotes stay as they are."""
    out: list[str] = []
    size = at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] in ("$", "\\"):
            piece, at = text[at + 1], at + 2
        elif char == "$":
            piece, at = _variable(text, at, env, depth)
        else:
            piece, at = char, at + 1
        size += len(piece)
        if size > MAX_VALUE:
            raise InvalidArgument(f"a value is larger than {MAX_VALUE} characters")
        out.append(piece)
    return "".join(out)


def _variable(text: str, at: int, env: Mapping[str, str], depth: int) -> tuple[str, int]:
    """Return the value of the variable that begins at a `$`, and where the text goes on."""
    braced = text.startswith("${", at)
    found = _NAME.match(text, at + (2 if braced else 1))
    if found is None:
        if braced:
            raise InvalidArgument(f"not a variable: {text[at : at + 40]!r}")
        return "$", at + 1
    name = found[0]
    if not braced:
        return env.get(name, ""), found.end()
    if depth >= _DEEPEST:
        raise InvalidArgument("variables are nested too deeply")
    end = _closing(text, found.end())
    modifier, after = text[found.end() : end], end + 1
    if not modifier:
        return env.get(name, ""), after
    operator = next((one for one in _OPERATORS if modifier.startswith(one)), None)
    if operator is None:
        raise InvalidArgument(f"not a variable that is understood here: ${{{name}{modifier[:20]}}}")
    word = modifier[len(operator) :]
    there = bool(env.get(name)) if operator.startswith(":") else name in env
    if operator.endswith("+"):
        return (expand_plain(word, env, depth + 1) if there else ""), after
    if there:
        return env[name], after
    if operator.endswith("?"):
        raise InvalidArgument(f"{name}: {expand_plain(word, env, depth + 1) or 'is not set'}")
    return expand_plain(word, env, depth + 1), after


def _closing(text: str, at: int) -> int:
    depth = 1
    while at < len(text):
        if text.startswith("${", at):
            depth, at = depth + 1, at + 2
            continue
        if text[at] == "}":
            depth -= 1
            if not depth:
                return at
        at += 1
    raise InvalidArgument("a ${ is never closed")


class _Words:
    """Splits a text as a shell would, without globs and commands."""

    def __init__(self, text: str, env: Mapping[str, str]) -> None:
        self._text = text
        self._env = env
        self._at = 0
        self._size = 0

    def all(self) -> list[str]:
        found: list[str] = []
        while True:
            while self._text[self._at : self._at + 1].isspace():
                self._at += 1
            if self._at >= len(self._text):
                return found
            found.append(self._word(stop_at_blanks=True))

    def rest(self) -> str:
        return self._word(stop_at_blanks=False)

    def _word(self, *, stop_at_blanks: bool) -> str:
        out: list[str] = []
        quote = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            if not quote and stop_at_blanks and char.isspace():
                break
            if char == quote:
                quote = ""
                self._at += 1
            elif not quote and char in "\"'":
                quote = char
                self._at += 1
            elif char == "\\" and quote != "'" and self._at + 1 < len(self._text):
                self._escaped(out, quote)
            elif char == "$" and quote != "'":
                value, self._at = _variable(self._text, self._at, self._env, 0)
                self._add(out, value)
            else:
                self._add(out, char)
                self._at += 1
        if quote:
            raise InvalidArgument(f"a {quote} is never closed")
        return "".join(out)

    def _escaped(self, out: list[str], quote: str) -> None:
        following = self._text[self._at + 1]
        keeps = quote == '"' and following not in '"\\$`'
        self._add(out, "\\" + following if keeps else following)
        self._at += 2

    def _add(self, out: list[str], piece: str) -> None:
        self._size += len(piece)
        if self._size > MAX_VALUE:
            raise InvalidArgument(f"a value is larger than {MAX_VALUE} characters")
        out.append(piece)
