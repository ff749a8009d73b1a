"""Reads a Dockerfile: logical lines, flags and here-documents, with the line that each instruction begins on.

The text is a stranger's. Its size, its number of instructions and its here-documents are bounded, and what is not known
is an error that names the line. Nothing is expanded here: that needs the environment (`variables.py`).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.errors import InvalidArgument

MAX_BYTES = 256 << 10
MAX_INSTRUCTIONS = 256
KNOWN = frozenset((
    "FROM", "RUN", "COPY", "ADD", "ARG", "ENV", "WORKDIR", "USER", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "VOLUME",
    "SHELL", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER",
))  # fmt: skip
_FLAGS = {
    "FROM": {"platform"},
    "COPY": {"from", "chown", "chmod", "link"},
    "ADD": {"chown", "chmod", "link"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}
_WITH_HEREDOCS = ("RUN", "COPY", "ADD")
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(.*?)\s*$")
_HEREDOC = re.compile(r"(?<!<)<<(-?)([\"']?)([A-Za-z_][A-Za-z0-9_.-]*)\2(?!<)")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document: its word, its text, and whether variables in it are expanded."""

    word: str
    text: str
    expands: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction as it stands in the file."""

    line: int
    name: str
    text: str  # after name and flags, continuations joined
    flags: dict[str, str] = field(default_factory=dict)
    heredocs: tuple[Heredoc, ...] = ()

    def wrong(self, why: str, hint: str = "") -> InvalidArgument:
        """Return an error that names the line."""
        return InvalidArgument(f"line {self.line}: {self.name} {why}", hint=hint, details={"line": self.line})

    def argv(self) -> tuple[str, ...] | None:
        """Return the words of the JSON form; None for the shell form."""
        if not self.text.startswith("["):
            return None
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) and "\0" not in word for word in value):
            return None
        return tuple(value)

    @property
    def shown(self) -> str:
        """Return the instruction on one short line, for progress and errors."""
        flags = "".join(f" --{name}={value}" for name, value in self.flags.items())
        text = " ".join(f"{self.name}{flags} {self.text}".split())
        return text if len(text) <= 120 else text[:117] + "..."


def parse(text: str) -> tuple[Instruction, ...]:
    """Return the file's instructions; InvalidArgument with the line of what cannot be read."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise InvalidArgument(f"a Dockerfile has at most {MAX_BYTES} bytes")
    if "\0" in text:
        raise InvalidArgument("the Dockerfile contains a NUL byte")
    found: list[Instruction] = []
    for instruction in _Reader(text).instructions():
        if len(found) == MAX_INSTRUCTIONS:
            raise instruction.wrong(f"is one too many: a build has at most {MAX_INSTRUCTIONS} instructions")
        found.append(instruction)
    if not any(one.name == "FROM" for one in found):
        raise InvalidArgument("the Dockerfile has no FROM", hint="its first instruction names an image: FROM debian:12")
    first = next(one for one in found if one.name not in ("ARG",))
    if first.name != "FROM":
        raise first.wrong("stands before the first FROM", "only ARG may")
    return tuple(found)


class _Reader:
    def __init__(self, text: str) -> None:
        self._lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
        self._at = 0
        self._escape = self._directives()

    def _directives(self) -> str:
        """Read the comments before everything else that steer the reading; return the escape character."""
        escape = "\\"
        for line in self._lines:
            found = _DIRECTIVE.match(line.strip())
            if found is None:
                return escape
            if found[1].lower() == "escape":
                if found[2] not in ("\\", "`"):
                    raise InvalidArgument(f"escape must be \\ or `, not {found[2]!r:.20}")
                escape = found[2]
        return escape

    def instructions(self) -> Iterator[Instruction]:
        while self._at < len(self._lines):
            begun, text = self._logical_line()
            if text:
                yield self._instruction(begun, text)

    def _logical_line(self) -> tuple[int, str]:
        """Return where the next line begins, and it with its continuations; comments and empty lines are left out."""
        parts: list[str] = []
        begun = 0
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            bare = line.strip()
            if bare.startswith("#") or (not bare and parts):
                continue
            begun = begun or self._at
            stripped = line.rstrip()
            if stripped.endswith(self._escape):
                parts.append(stripped[:-1])
                continue
            parts.append(line)
            break
        return begun, "".join(parts).strip()

    def _instruction(self, line: int, text: str) -> Instruction:
        word, _, rest = text.partition(" ") if " " in text else text.partition("\t")
        name, rest = word.upper(), rest.strip()
        bare = Instruction(line, name[:40], rest)
        if name not in KNOWN:
            raise bare.wrong("is not supported here", "supported are " + ", ".join(sorted(KNOWN)))
        flags: dict[str, str] = {}
        while (found := _FLAG.match(rest)) is not None:
            if name == "RUN" or found[1] not in _FLAGS.get(name, ()):
                raise bare.wrong(f"has a flag that is not supported here: --{found[1]}")
            if found[1] in flags:
                raise bare.wrong(f"has the flag --{found[1]} twice")
            flags[found[1]] = found[2] or ""
            rest = rest[found.end() :]
        if not rest:
            raise bare.wrong("has no arguments")
        heredocs = tuple(self._heredocs(bare, rest)) if name in _WITH_HEREDOCS else ()
        return Instruction(line, name, rest, flags, heredocs)

    def _heredocs(self, bare: Instruction, rest: str) -> Iterator[Heredoc]:
        for strips, quote, word in _HEREDOC.findall(rest):
            lines: list[str] = []
            while True:
                if self._at == len(self._lines):
                    raise bare.wrong(f"has a here-document that never ends: no line with only {word}")
                line = self._lines[self._at]
                self._at += 1
                if strips:
                    line = line.lstrip("\t")
                if line == word:
                    break
                lines.append(line)
            yield Heredoc(word, "".join(f"{line}\n" for line in lines), not quote)


def without_heredocs(text: str) -> str:
    """Return an instruction's text without its here-document words."""
    return " ".join(_HEREDOC.sub(" ", text).split())


def is_only_heredoc(text: str) -> bool:
    """Return whether a RUN is nothing but one here-document, which then is the script."""
    return _HEREDOC.fullmatch(text.strip()) is not None


def heredoc_marks(text: str) -> list[str]:
    """Return the here-document words as they stand in the text, with dashes and quotes."""
    return [found.group(0) for found in _HEREDOC.finditer(text)]
