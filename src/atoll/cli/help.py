"""Words about the CLI, all made from the table of verbs: help, version, completion scripts, the catalog."""

from __future__ import annotations

import os

from .. import __version__
from .grammar import UsageError, Verb, nearest
from .output import in_own_name, print_json, program_name, tell
from .verbs import BY_NAME, GROUPS, SHARED, VERBS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .grammar import Arguments, Flag

EXIT_CODES = """Exit codes
  sandbox verbs: 0 ok, 1 request failed, 2 service unreachable, 8 resources exhausted; run: the command's own
  other verbs:   the command's own, 124 timed out, 125 atoll failed, 2 wrong usage, 130 interrupted"""

ENVIRONMENT = """Environment
  ATOLL_HOME       where all state lives (default ~/.atoll)
  ATOLL_RUNTIME    runtime for new sandboxes
  ATOLL_ENDPOINT, ATOLL_APIKEY, ATOLL_PROFILE, ATOLL_DEBUG  the same as --endpoint, --apikey, --context and --debug
  ATOLL_CERT, ATOLL_KEY, ATOLL_CERT_DIR                     a CA file, or a client certificate and its key; where they are kept
  ATOLL_CONFIG     file of connection profiles
  ATOLL_TENANT, ATOLL_SESSION_ID, ATOLL_DEVICE_NAME, ATOLL_MCP_ADDR
  K8E_SANDBOX_* work as well; ATOLL_* wins"""


# The verbs of the short help; everything else is in its group, and in `help --all`.
FIRST = {
    "Run code": ("run", "sandbox run"),
    "Sandboxes that stay": ("sandbox create", "list", "exec", "shell", "attach", "cp", "stop", "start", "remove"),
    "For coding agents": ("skill install", "mcp"),
    "This machine": ("doctor", "daemon status", "config show", "egress log", "image list"),
}


def overview(group: str | None = None, everything: bool = False) -> None:
    lines = [
        f"{program_name()} {__version__}: run code where it cannot hurt this machine",
        "",
        f"Usage: {program_name()} <command> [flags]",
        "",
    ]
    if group is not None:
        lines += _verb_lines([verb for verb in VERBS if verb.name.startswith(group + " ")])
    elif everything:
        for title, verbs in _by_group().items():
            lines += [title, *_verb_lines(verbs), ""]
    else:
        width = max(len(_head(BY_NAME[name])) for names in FIRST.values() for name in names) + 2
        for title, names in FIRST.items():
            lines += [title, *_verb_lines([BY_NAME[name] for name in names], width), ""]
        shown = {name for names in FIRST.values() for name in names}
        more = sorted({verb.name.split()[0] for verb in VERBS if verb.name not in shown})
        lines += ["More", *_wrapped(more), ""]
    if lines[-1]:
        lines.append("")
    lines += ["`atoll help <command>` shows flags and examples, `atoll help --all` every command.", "", EXIT_CODES]
    tell(in_own_name("\n".join([*lines, "", ENVIRONMENT] if everything else lines)))


def _by_group() -> dict[str, list[Verb]]:
    """Commands of one word first, then each group by its name."""
    groups: dict[str, list[Verb]] = {"Commands": []}
    for verb in sorted(VERBS, key=lambda verb: verb.name):
        first = verb.name.split()[0]
        groups.setdefault(first if first in GROUPS else "Commands", []).append(verb)
    return groups


def _head(verb: Verb) -> str:
    return f"{verb.name} {verb.positionals}".rstrip()


def _verb_lines(verbs: list[Verb], width: int = 0) -> list[str]:
    width = width or max(len(_head(verb)) for verb in verbs) + 2
    return [_indented(f"  {_head(verb).ljust(width)}", verb.help) for verb in verbs]


def _indented(head: str, text: str) -> str:
    """Return a head and its words, which at a terminal go on below themselves instead of at its edge."""
    columns = os.get_terminal_size(1).columns if os.isatty(1) else 0
    if len(head) + len(text) < columns or columns - len(head) < 30:
        return head + text
    return head + ("\n" + " " * len(head)).join(line[2:] for line in _wrapped(text.split(), columns - len(head)))


def _wrapped(words: list[str], most: int = 100) -> list[str]:
    lines = [" "]
    for word in words:
        if len(lines[-1]) + len(word) > most:
            lines.append(" ")
        lines[-1] += " " + word
    return lines


def describe(verb: Verb) -> None:
    lines = [f"Usage: {program_name()} {verb.usage}", "", verb.help]
    if verb.flags:
        lines += ["", "Flags", *_flag_lines(verb.flags)]
    own = {flag.name for flag in verb.flags}
    lines += ["", "Everywhere", *_flag_lines(tuple(flag for flag in SHARED if flag.name not in own))]
    if verb.examples:
        lines += ["", "Examples", *[f"  {example}" for example in verb.examples]]
    tell(in_own_name("\n".join(lines)))


def _all_flags(verb: Verb) -> tuple[Flag, ...]:
    own = {flag.name for flag in verb.flags}
    return (*verb.flags, *(flag for flag in SHARED if flag.name not in own))


def _meaning(flag: Flag) -> str:
    """The words about a flag; the names of runtimes come from their registry."""
    if "{runtimes}" not in flag.help:
        return flag.help
    from ..backends import registry

    return flag.help.replace("{runtimes}", registry.in_words())


def _flag_lines(flags: tuple[Flag, ...]) -> list[str]:
    heads = [f"  {f'-{f.short}, ' if f.short else '    '}--{f.name}{f' {f.value}' if f.value else ''}" for f in flags]
    width = max(map(len, heads)) + 2
    return [_indented(head.ljust(width), _meaning(flag)) for head, flag in zip(heads, flags, strict=True)]


def show(arguments: Arguments) -> int:
    name = " ".join(arguments.rest)
    if not name or name in GROUPS or any(verb.startswith(name + " ") for verb in BY_NAME if name not in BY_NAME):
        overview(name or None, bool(arguments.all))
    elif name in BY_NAME:
        describe(BY_NAME[name])
    else:
        raise UsageError(f"unknown command {name!r}", nearest(name, list(BY_NAME)) or f"see: {program_name()} help")
    return 0


def version(arguments: Arguments) -> int:
    if arguments.values.get("check"):
        from .versions import check_versions

        return check_versions(arguments)
    if arguments.json:
        print_json({"version": __version__})
    else:
        tell(f"atoll {__version__}")
    return 0


def catalog(_: Arguments) -> int:
    commands = []
    for verb in VERBS:
        if verb.is_json:
            flags = [{"name": f"--{flag.name}", "usage": _meaning(flag)} for flag in _all_flags(verb)]
            commands.append({"name": verb.name.split(" ", 1)[1], "usage": verb.usage, "flags": flags})
    print_json({"catalog_version": 1, "commands": commands})
    return 0


def completion(arguments: Arguments) -> int:
    shell = arguments.rest[0]
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in scripts:
        raise UsageError(f"no completion for {shell!r}", "bash, zsh or fish")
    tell(scripts[shell]())
    return 0


def _words() -> dict[str, list[str]]:
    """Return the words that may follow each prefix of a command line."""
    table: dict[str, list[str]] = {"": sorted({verb.name.split()[0] for verb in VERBS})}
    for group in GROUPS:
        table[group] = list(dict.fromkeys(v.name.split()[1] for v in VERBS if v.name.startswith(group + " ")))
    for verb in VERBS:
        group, _, last = verb.name.rpartition(" ")
        if " " in group:
            table.setdefault(group, []).append(last)
        table[verb.name] = [f"--{flag.name}" for flag in _all_flags(verb)]
    return table


def _bash() -> str:
    cases = "\n".join(f"    '{prefix}') words='{' '.join(words)}';;" for prefix, words in _words().items())
    return f"""_atoll() {{
  local words='' key="${{COMP_WORDS[1]}}" current="${{COMP_WORDS[COMP_CWORD]}}"
  [ "$COMP_CWORD" -le 1 ] && key=''
  case "$key" in {"|".join(GROUPS)}) [ "$COMP_CWORD" -ge 3 ] && key="$key ${{COMP_WORDS[2]}}";; esac
  case "$key" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [ -z "$COMPREPLY" ] && COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _atoll atoll"""


def _zsh() -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash()


def _fish() -> str:
    lines = ["complete -c atoll -f"]
    for prefix, words in _words().items():
        parts = prefix.split()
        if not parts:
            condition = "__fish_use_subcommand"
        elif prefix in GROUPS:
            known = " ".join(words)
            condition = f"__fish_seen_subcommand_from {prefix}; and not __fish_seen_subcommand_from {known}"
        else:
            condition = "; and ".join(f"__fish_seen_subcommand_from {part}" for part in parts)
        for word in words:
            option = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c atoll -n '{condition}' {option}")
    return "\n".join(lines)
