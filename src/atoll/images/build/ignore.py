"""Patterns of paths, and `.dockerignore`: which files of a context are left out.

Patterns are a stranger's, so matching takes time in proportion to pattern and path, never exponential: no regular
expressions. In an ignore file the last pattern that fits decides; `!` takes a file back in.
"""

from atoll.errors import InvalidArgument

MAX_PATTERNS = 1000
MAX_LENGTH = 4096


class Pattern:
    """A pattern of paths: `*`, `?` and `[...]` stay within a name, `**` is any number of directories."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise InvalidArgument(f"a pattern of files has at most {MAX_LENGTH} characters")
        parts: list[str] = []
        for part in text.split("/"):
            if part in ("", "."):
                continue
            if part == "..":
                del parts[-1:]
            elif part != "**" or parts[-1:] != ["**"]:
                parts.append(part)
        self.parts = tuple(parts)
        self.is_plain = not any(char in part for part in parts for char in "*?[\\")

    def matches(self, path: str, *, below: bool = False) -> bool:
        """Return whether the pattern fits the whole path; with `below` also when it fits a directory above it."""
        names = path.split("/") if path else []
        # Which numbers of leading names the pattern's parts so far can have used up.
        reached = {0}
        for part in self.parts:
            if part == "**":
                reached = set(range(min(reached), len(names) + 1))
                continue
            reached = {at + 1 for at in reached if at < len(names) and match_name(part, names[at])}
            if not reached:
                return False
        return below or len(names) in reached


def match_name(pattern: str, name: str) -> bool:
    """Return whether a pattern without slashes fits a name. After a mismatch only the last `*` takes one character more."""
    at = place = 0
    star = mark = -1
    while place < len(name):
        width = _fits(pattern, at, name[place]) if at < len(pattern) else 0
        if at < len(pattern) and pattern[at] == "*":
            star, mark = at, place
            at += 1
        elif width:
            at, place = at + width, place + 1
        elif star >= 0:
            mark += 1
            at, place = star + 1, mark
        else:
            return False
    return not pattern[at:].strip("*")


def _fits(pattern: str, at: int, char: str) -> int:
    """Return how many characters of the pattern this character uses up; 0 when it does not fit."""
    here = pattern[at]
    if here == "?":
        return 1
    if here == "\\" and at + 1 < len(pattern):
        return 2 if pattern[at + 1] == char else 0
    end = pattern.find("]", at + 2) if here == "[" else -1
    if end < 0:
        return 1 if here == char and here != "*" else 0
    negated = pattern[at + 1] in "!^"
    place = at + 2 if negated else at + 1
    found = False
    while place < end and not found:
        if end - place >= 3 and pattern[place + 1] == "-":
            found = pattern[place] <= char <= pattern[place + 2]
            place += 3
        else:
            found = pattern[place] == char
            place += 1
    return end + 1 - at if found is not negated else 0


class Ignore:
    """The patterns of one ignore file."""

    def __init__(self, text: str = "") -> None:
        self._rules: list[tuple[Pattern, bool]] = []
        for raw in text.splitlines():
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            if len(self._rules) == MAX_PATTERNS:
                raise InvalidArgument(f".dockerignore has more than {MAX_PATTERNS} patterns")
            takes_back = line.startswith("!")
            pattern = Pattern(line[1:].strip() if takes_back else line)
            if pattern.parts:
                self._rules.append((pattern, takes_back))

    def __len__(self) -> int:
        return len(self._rules)

    @property
    def takes_back(self) -> bool:
        """Return whether some pattern takes files back in, so that an ignored directory must still be looked through."""
        return any(takes_back for _, takes_back in self._rules)

    def leaves_out(self, path: str) -> bool:
        """Return whether this path of the context is ignored."""
        ignored = False
        for pattern, takes_back in self._rules:
            if ignored is takes_back and pattern.matches(path, below=True):
                ignored = not takes_back
        return ignored
