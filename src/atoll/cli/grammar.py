"""The form of a verb, and the parser of its arguments. `verbs.py` is the table; parser, help, completion and catalog use it.

Not argparse: it costs half an interpreter start to import, and twenty runs a minute feel that.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

    Values: TypeAlias = dict[str, Any]  # of flags, each as its kind reads it


_EXAMPLES = {"MB": "512", "SECONDS": "60", "PORT": "8000", "BYTES": "65536", "TIME": "1700000000", "N": "10",
             "cpus": "2", "pids": "256", "files": "1024", "lifetime": "3600", "idle-timeout": "1800"}  # fmt: skip


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # that a number of seconds may end with


class UsageError(Exception):
    """The command line is wrong; the text says how, `hint` what would be right."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Flag:
    """An option: `value` is its placeholder in help (empty for a switch), `kind` how the text is read."""

    __slots__ = ("default", "help", "kind", "name", "repeat", "short", "value")

    def __init__(
        self, name: str, value: str, help: str, *, kind: str = "text", default: Any = None, short: str = "",
        repeat: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.value = value
        self.help = help
        self.kind = kind
        self.default = default
        self.short = short
        self.repeat = repeat

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    def read(self, text: str) -> Any:
        try:
            if self.kind == "int":
                return int(text)
            if self.kind == "number":
                times = _UNITS.get(text[-1:], 0) if self.value == "SECONDS" else 0
                number = float(text[:-1]) * times if times else float(text)
                if number != number or number in (float("inf"), float("-inf")):
                    raise ValueError
                return int(number) if number == int(number) else number
        except ValueError:
            unit = f" of {self.value}" if self.value in ("MB", "SECONDS", "BYTES") else ""
            example = _EXAMPLES.get(self.name) or _EXAMPLES.get(self.value, "1")
            raise UsageError(
                f"--{self.name} needs a number{unit}, not {text!r}", f"for example --{self.name} {example}"
            ) from None
        if self.kind == "csv":
            return [part.strip() for part in text.split(",") if part.strip()]
        if self.kind == "pair":
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise UsageError(f"--{self.name} needs NAME=VALUE, not {text!r}")
            return key, value
        return text


SANDBOX_WORDS = ("ID", "REF", "SANDBOX", "PARENT_ID")  # a first positional of this name is a sandbox
SESSION = Flag("session-id", "ID", "the sandbox, in place of the first argument")


class Verb:
    """One command: its name (with the group), where its function is, its positionals and flags, its words."""

    __slots__ = (
        "at_least", "at_most", "examples", "flags", "handler", "help", "name", "passes", "positionals", "takes_sandbox",
    )  # fmt: skip

    def __init__(
        self, name: str, handler: str, positionals: str, help: str, flags: Sequence[Flag] = (),
        examples: Sequence[str] = (), *, passes: int = 0,
    ) -> None:  # fmt: skip
        self.name = name
        self.handler = handler  # "module:function" below atoll.cli, or a full name; imported only when called
        self.positionals = positionals  # "REF PATH", optional ones in brackets, "..." for any number more
        self.help = help
        self.flags = tuple(flags)
        self.examples = tuple(examples)
        self.passes = passes  # after so many positionals everything is passed on unread (a command's own arguments)
        words = positionals.split()
        self.takes_sandbox = (
            bool(words)
            and words[0].strip("[]") in SANDBOX_WORDS
            and not any(flag.name == SESSION.name for flag in self.flags)
        )
        if self.takes_sandbox:
            self.flags = (*self.flags, SESSION)
        self.at_least = sum(1 for word in words if not word.startswith("["))
        self.at_most = None if positionals.endswith(("...", "...]")) else len(words)

    @property
    def usage(self) -> str:
        flags = " [flags]" if self.flags else ""
        return f"{self.name}{flags}{' ' if self.positionals else ''}{self.positionals}"

    @property
    def is_json(self) -> bool:
        """K8E's verbs speak JSON, errors too; the others speak to people."""
        return self.name.startswith("sandbox ")


class Arguments:
    """The values read: flags as attributes (None when not given and without default), positionals in `rest`."""

    def __init__(self, rest: list[str], values: Values, verb: str = "") -> None:
        self.rest = rest
        self.values = values
        self.verb = verb

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


def parse(verb: Verb, words: Sequence[str], shared: Sequence[Flag] = ()) -> Arguments:
    """Read the words after the verb's name."""
    flags = {flag.name: flag for flag in (*shared, *verb.flags)}
    shorts = {flag.short: flag for flag in flags.values() if flag.short}
    values: Values = {flag.key: [] if flag.repeat else flag.default for flag in flags.values()}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            rest += queue
            break
        named = 1 if verb.takes_sandbox and values.get("session_id") else 0
        if verb.passes and len(rest) >= verb.passes - named:
            rest += [word, *queue]
            break
        if word.startswith("--"):
            name, equals, inline = word[2:].partition("=")
            if name not in flags:
                raise UsageError(f"{verb.name} has no flag --{name}", nearest(name, flags, "--"))
            _set(values, flags[name], inline if equals else None, queue)
        elif len(word) > 1 and word[0] == "-" and word[1] in shorts:
            _set_shorts(values, shorts, word[1:], queue, verb)
        elif len(word) > 1 and word[0] == "-" and not _is_number(word):
            raise UsageError(f"{verb.name} has no flag {word}", "put -- before an argument that starts with a dash")
        else:
            rest.append(word)
    if values.get("help"):
        return Arguments(rest, values, verb.name)
    if verb.takes_sandbox and values.get("session_id"):
        rest.insert(0, values["session_id"])
    if len(rest) < verb.at_least:
        raise UsageError(f"{verb.name} needs {verb.positionals}", f"usage: {_program()} {verb.usage}")
    if verb.at_most is not None and len(rest) > verb.at_most:
        by_flag = "name the sandbox with --session-id" if "session-id" in flags else ""
        raise UsageError(
            f"{verb.name} takes {verb.positionals or 'no arguments'}; {rest[verb.at_most]!r} is too many", by_flag
        )
    return Arguments(rest, values, verb.name)


def _program() -> str:
    from .output import program_name

    return program_name()


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()


def _set(values: Values, flag: Flag, inline: str | None, queue: list[str]) -> None:
    if flag.kind == "optional":
        values[flag.key] = inline or ""
        return
    if not flag.value:
        if inline not in (None, "true", "false"):
            raise UsageError(f"--{flag.name} takes no value")
        values[flag.key] = inline != "false"
        return
    if inline is None:
        if not queue:
            raise UsageError(f"--{flag.name} needs a value ({flag.value})")
        inline = queue.pop(0)
    read = flag.read(inline)
    if flag.repeat:
        values[flag.key] = [*values[flag.key], *(read if isinstance(read, list) else [read])]
    else:
        values[flag.key] = read


def _set_shorts(values: Values, shorts: dict[str, Flag], letters: str, queue: list[str], verb: Verb) -> None:
    """`-it` is `-i -t`; a letter that needs a value takes the rest of the word or the next one."""
    for place, letter in enumerate(letters):
        flag = shorts.get(letter)
        if flag is None:
            raise UsageError(f"{verb.name} has no flag -{letter}")
        if flag.value:
            _set(values, flag, letters[place + 1 :] or None, queue)
            return
        _set(values, flag, None, queue)


def nearest(word: str, known: Sequence[str] | dict[str, Flag], prefix: str = "") -> str:
    """`did you mean X?` when something similar exists, else nothing."""
    from difflib import get_close_matches

    found = get_close_matches(word, list(known), 1, 0.6)
    return f"did you mean {prefix}{found[0]}?" if found else ""
