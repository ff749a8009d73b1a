"""The command line. `main` finds the verb, reads its arguments, calls its function and turns what happens into an exit
code; everything else is imported only when a verb needs it.
"""

from __future__ import annotations

import os
import sys

from ..errors import AtollError
from .grammar import UsageError, Verb, nearest, parse
from .output import (
    BROKEN_PIPE,
    FAILED,
    INTERRUPTED,
    USAGE,
    begin_output,
    end_output,
    errors_to_stderr,
    print_error,
    program_name,
    report,
    say,
    silence,
)
from .verbs import ALIASES, BY_NAME, GROUPS, SHARED

PASSING = (
    "attach",
    "sandbox snapshot export",
    "sandbox export",
    "mcp",
    "mcp-server",
    "serve",
    "replay",
)  # bytes, not text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .grammar import Arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if os.path.basename(sys.argv[0]).startswith("k8e"):
        from ..surfaces.k8e.cli.translate import translate

        words = translate(words)
    before, words = _shared_first(words)
    if words and words[0] in ALIASES:
        words[:1] = ALIASES[words[0]].split()
    as_json = words[:1] == ["sandbox"] and os.path.basename(sys.argv[0]) != "agentkernel"
    if as_json and "--raw" in (words[: words.index("--")] if "--" in words else words):
        errors_to_stderr()
    words = before + words
    debug = "--debug" in words or bool(os.environ.get("ATOLL_DEBUG") or os.environ.get("K8E_SANDBOX_DEBUG"))
    try:
        return _dispatch(words)
    except UsageError as bad:
        return _report_usage(bad, as_json)
    except AtollError as error:
        return report(error, as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        silence()
        return BROKEN_PIPE
    except Exception as bug:
        if debug:
            raise
        from ..errors import Internal, InvalidArgument

        if isinstance(bug, FileNotFoundError) and not os.stat(".").st_nlink:
            return report(
                InvalidArgument("this directory does not exist any more", hint="cd to one that does"), as_json
            )
        hint = "run it again with --debug, and please report what it prints"
        return report(Internal(f"{type(bug).__name__}: {bug}", hint=hint), as_json)


def _dispatch(words: list[str]) -> int:
    verb, rest, moved = find(words)
    if verb is None:
        return _help(moved + rest)
    arguments = parse(verb, moved + rest, SHARED)
    if arguments.help:
        from .help import describe

        describe(verb)
        return 0
    begin_output(
        bool(arguments.values.get("json")), collect=verb.name not in PASSING and not arguments.values.get("raw")
    )
    try:
        code = handler_of(verb)(arguments)
    except AtollError as error:
        if error.message.startswith("no sandbox '"):
            from .ended import explain_end

            explain_end(error, arguments)
        raise
    end_output(code)
    return code


def handler_of(verb: Verb) -> Callable[[Arguments], int]:
    """Import the function that a verb names: `module:function`, below atoll.cli or by its full name."""
    module, _, function = verb.handler.partition(":")
    name = module if module.startswith("atoll.") else f"{__name__}.{module}"
    __import__(name)
    found: Callable[[Arguments], int] = getattr(sys.modules[name], function)
    return found


def find(words: list[str]) -> tuple[Verb | None, list[str], list[str]]:
    """The verb these words name, what follows it, and shared flags that stood before it. None: help is wanted."""
    before, words = _shared_first(words)
    if not words or words[0] in ("-h", "--help"):
        return None, [], []
    if words[0] in ("-V", "--version"):
        return BY_NAME["version"], words[1:], []
    alone = words[0] in BY_NAME and (len(words) == 1 or " ".join(words[:2]) not in BY_NAME)
    if alone or words[0] not in GROUPS:
        verb = BY_NAME.get(words[0])
        if verb is None:
            raise UsageError(f"unknown command {words[0]!r}", _meant(words[0]) or f"see: {program_name()} help")
        return verb, words[1:], before
    group = words[0]
    moved, rest = _shared_first(words[1:])
    moved = before + moved
    if not rest or rest[0] in ("-h", "--help", "help"):
        return None, [group], []
    verb = BY_NAME.get(" ".join((group, *rest[:2])))
    if verb is not None and len(rest) > 1:
        return verb, rest[2:], moved
    verb = BY_NAME.get(f"{group} {rest[0]}")
    if verb is None:
        below = [name for name in BY_NAME if name.startswith(f"{group} {rest[0]} ")]
        if below:
            raise UsageError(
                f"{group} {rest[0]} needs one more word", "one of " + ", ".join(n.split()[2] for n in below)
            )
        raise UsageError(f"unknown command {group} {rest[0]!r}", _meant_below(group, rest[0]))
    return verb, rest[1:], moved


# Words other tools have for a verb of ours; their spelling alone would lead to a wrong one.
_SYNONYMS = {
    "logs": "sandbox log",
    "processes": "sandbox ps",
    "rm": "remove",
    "ls": "list",
    "ports": "sandbox expose",
    "sandbox ports": "sandbox expose, or sandbox exposed for the list",
    "sandbox port": "sandbox expose",
    "sandbox forward": "sandbox expose",
}


def _meant_below(group: str, word: str) -> str:
    """Return what somebody who types this below a group may look for."""
    if meant := _SYNONYMS.get(f"{group} {word}"):
        return f"did you mean {meant}?"
    members = [name.split()[1] for name in BY_NAME if name.startswith(group + " ")]
    return nearest(word, members, group + " ") or f"see: {program_name()} help {group}"


def _meant(word: str) -> str:
    """Suggest a verb for an unknown word: the same word below `sandbox`, else a similar one."""
    if f"sandbox {word}" in BY_NAME:
        return f"did you mean sandbox {word}?"
    if word in _SYNONYMS:
        return f"did you mean {_SYNONYMS[word]}?"
    return nearest(word, [name.split()[0] for name in BY_NAME])


def _shared_first(words: list[str]) -> tuple[list[str], list[str]]:
    """The flags every verb has that stand at the beginning, and the rest."""
    moved: list[str] = []
    takes_value = {f"--{flag.name}": bool(flag.value) for flag in SHARED if flag.name != "help"}
    while words and words[0].partition("=")[0] in takes_value:
        count = 2 if takes_value[words[0].partition("=")[0]] and "=" not in words[0] else 1
        moved, words = moved + words[:count], words[count:]
    return moved, words


def _help(words: list[str]) -> int:
    from .help import overview

    overview(words[0] if words else None)
    return 0


def _report_usage(bad: UsageError, as_json: bool) -> int:
    if as_json:
        detail = bad.message + (f" ({bad.hint})" if bad.hint else "")
        print_error({"ok": False, "error": "invalid_argument", "detail": detail, "retry": "no"})
        return FAILED
    say(f"{program_name()}: {bad.message}")
    if bad.hint:
        say(f"  {bad.hint}")
    return USAGE
