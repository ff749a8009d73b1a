"""The table of verbs against the one the contract has, and the words of help and skills against the table (D36)."""

import re
import shlex

import pytest

from atoll.cli import find
from atoll.cli.grammar import UsageError, parse
from atoll.cli.verbs import ALIASES, BY_NAME, SHARED, VERBS
from atoll.skill.install import skill_text

from .conftest import Machine

FILLING = ("manifest", "git-repo", "git-ref", "git-path")
CONTRACT = {
    "run": ("lang", "timeout", "session-id", "tenant", "raw", "background", "allowed-hosts", *FILLING),
    "status": (),
    "create": ("runtime", "tenant", "allowed-hosts", "session-id", "env", "secret", *FILLING),
    "get": ("json",),
    "sessions": ("phase",),
    "destroy": (),
    "write": ("mode",),
    "read": ("raw",),
    "list": ("since", "json"),
    "subagent": (),
    "confirm": ("timeout", "no-wait"),
    "approve": ("reject", "reason"),
    "snapshot save": (),
    "snapshot list": (),
    "snapshot restore": ("runtime", "tenant", "allowed-hosts", "base"),
    "snapshot delete": (),
    "poll": ("follow",),
    "log": ("offset", "limit", "follow"),
    "events": ("limit", "json"),
    "ps": (),
    "expose": ("port", "session-id", "host"),
    "unexpose": ("port", "session-id"),
    "exposed": ("session-id",),
    "allow-hosts": ("hosts", "add", "remove", "clear", "session-id"),
    "connect": ("agent", "skip-skill", "skill-only", "skip-verify", "skip-path", "reset-certs"),
    "login": ("device-name",),
    "doctor": ("json", "fix"),
    "benchmark": ("pool-size", "iterations"),
    "catalog": (),
    "api-key create": ("ttl",),
    "api-key list": (),
    "api-key delete": (),
    "pause": (),
    "resume": (),
    "install-skill": (),
}
DEFAULTS = {
    "run": {"lang": "bash"}, "write": {"mode": "w"}, "sessions": {"phase": "Active"}, "events": {"limit": 500},
    "log": {"offset": 0, "limit": 0}, "confirm": {"timeout": 30}, "connect": {"agent": "auto"},
    "benchmark": {"pool-size": 3, "iterations": 3}, "api-key create": {"ttl": "30d"},
}  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")


def test_k8e_D36_the_catalog_has_every_verb_and_flag_of_the_contract(bare: Machine) -> None:
    catalog = bare.ok("sandbox", "catalog")
    assert catalog["catalog_version"] == 1
    listed = {command["name"]: {flag["name"] for flag in command["flags"]} for command in catalog["commands"]}
    for verb, flags in CONTRACT.items():
        assert verb in listed
        wanted = {f"--{name}" for name in (*flags, "endpoint", "apikey", "debug")}
        assert wanted <= listed[verb], (verb, wanted - listed[verb])
    assert all(flag["usage"] for command in catalog["commands"] for flag in command["flags"])


@pytest.mark.parametrize("verb", DEFAULTS)
def test_k8e_D36_defaults_are_the_contracts(verb: str) -> None:
    flags = {flag.name: flag.default for flag in BY_NAME[f"sandbox {verb}"].flags}
    assert {name: flags[name] for name in DEFAULTS[verb]} == DEFAULTS[verb]


@pytest.mark.parametrize("word", ["sandbox-mcp", "sandbox-install-skill", "sandbox-apikey", "sandbox-gateway"])
def test_k8e_D36_the_hyphenated_forms_exist(word: str) -> None:
    assert word in BY_NAME or word in ALIASES


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_k8e_D36_each_flag_that_help_names_exists(verb: object) -> None:
    texts = [verb.help, *verb.examples, *(flag.help for flag in verb.flags)]
    known = {flag.name for other in VERBS for flag in other.flags} | {flag.name for flag in SHARED}
    known |= {"profile"}  # by K8E's program names
    for text in texts:
        assert set(FLAG.findall(text)) <= known | {"version"}, text
    for example in verb.examples:
        for command in _commands(example):
            _parse(command)


@pytest.mark.parametrize("skill", ["k8e-sandbox", "agentkernel"])
def test_k8e_D36_each_command_in_a_skill_can_be_given(skill: str) -> None:
    found = [command for line in skill_text(skill).splitlines() for command in _commands(line)]
    assert len(found) > 3
    for command in found:
        _parse(command)


def _commands(line: str) -> list[list[str]]:
    """The commands of this program in a line of shell or prose, as words."""
    found = []
    for part in re.split(r"`", line) if "`" in line else [line]:
        started = re.search(
            r"(?:^|[\s(|])(?:atoll|k8e|agentkernel) ((?:sandbox[\w-]*|run|exec|create|secret|key) .*)", " " + part
        )
        if not started or "..." in started[1] or "<" in started[1].split("<<")[0] or "[" in started[1]:
            continue
        text = re.split(r"\s[|&>;]|\s<<|\)|\s#", started[1])[0]
        try:
            found.append(shlex.split(text))
        except ValueError:
            continue
    return found


def _parse(words: list[str]) -> None:
    if words and words[0] in ALIASES:
        words = [*ALIASES[words[0]].split(), *words[1:]]
    if words[-1] in ("sandbox",) or len(words) < 2:
        return
    verb, rest, moved = find(words)
    assert verb is not None
    try:
        parse(verb, moved + rest, SHARED)
    except UsageError as bad:
        if "needs" in bad.message and "has no flag" not in bad.message:
            return  # prose names a verb without its arguments
        raise AssertionError(f"{words}: {bad.message}") from None
