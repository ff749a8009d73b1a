"""The parser, and that help, completion and catalog come from the same table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll.cli import find, handler_of, main
from atoll.cli.grammar import UsageError, parse
from atoll.cli.help import FIRST
from atoll.cli.output import safe, safe_bytes
from atoll.cli.verbs import BY_NAME, SHARED, VERBS
from atoll.client.codec import loads

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(atoll.__file__)))


def read(*words: str) -> object:
    verb, rest, moved = find(list(words))
    assert verb is not None
    return parse(verb, moved + rest, SHARED)


def test_flags_may_stand_anywhere_and_take_values_both_ways() -> None:
    args = read(
        "sandbox",
        "--endpoint",
        "unix:/x",
        "run",
        "--lang=python",
        "print(1)",
        "--timeout",
        "2.5",
        "--env",
        "A=b=c",
        "-eB=",
    )
    assert (args.lang, args.rest, args.timeout, args.endpoint) == ("python", ["print(1)"], 2.5, "unix:/x")
    assert dict(args.env) == {"A": "b=c", "B": ""}


def test_two_dashes_end_the_flags() -> None:
    assert read("sandbox", "run", "--", "--raw").rest == ["--raw"]
    assert read("sandbox", "run", "-5").rest == ["-5"]


def test_a_commands_own_flags_are_passed_on() -> None:
    args = read("exec", "-it", "box", "ls", "-la", "--color")
    assert (args.rest, args.interactive, args.tty) == (["box", "ls", "-la", "--color"], True, True)
    assert read("exec", "box", "--", "-x").rest == ["box", "-x"]


@pytest.mark.parametrize(
    "words",
    [
        ["sandbox", "run", "--lan", "x"],
        ["sandbox", "run", "a", "b"],
        ["sandbox", "run", "--timeout", "soon"],
        ["sandbox", "run", "--timeout", "nan"],
        ["sandbox", "run", "--timeout"],
        ["sandbox", "run", "--raw=maybe"],
        ["sandbox", "create", "--env", "nothing"],
        ["sandbox", "read", "only-id"],
        ["sandbox", "nothing"],
        ["exec", "box"],
        ["exec", "-z", "box", "ls"],
        ["nothing"],
    ],
)
def test_wrong_words_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(UsageError):
        read(*words)


@pytest.mark.parametrize(
    ("typed", "meant"), [("expose", "sandbox expose"), ("logs", "sandbox log"), ("rm", "remove"), ("exce", "exec")]
)
def test_a_verb_of_another_place_is_suggested(typed: str, meant: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([typed, "x"]) == 2
    assert f"did you mean {meant}?" in capfd.readouterr().err


def test_a_near_miss_is_suggested(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["exce", "x"]) == 2
    assert "did you mean exec?" in capfd.readouterr().err
    assert main(["sandbox", "creat"]) == 1
    answer = loads(capfd.readouterr().out)
    assert answer["ok"] is False and "did you mean sandbox create?" in answer["detail"]
    assert main(["sandbox", "run", "--lagn", "x"]) == 1
    assert "did you mean --lang?" in loads(capfd.readouterr().out)["detail"]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_has_help_and_a_function(verb: object, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.name.split(), "--help"]) == 0
    shown = capfd.readouterr().out
    for flag in verb.flags:
        assert f"--{flag.name}" in shown
    assert callable(handler_of(verb))


def test_help_shows_what_is_used_first_and_all_of_it_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and main(["help"]) == 0 and main(["--help"]) == 0
    first = capfd.readouterr().out
    assert len(first.splitlines()) < 3 * 50 and first.index("Run code") < first.index("doctor")
    assert all(name in BY_NAME for names in FIRST.values() for name in names)
    assert all(
        word in first for word in {verb.name.split()[0] for verb in VERBS}
    )  # each has at least its first word there
    assert main(["help", "--all"]) == 0
    everything = capfd.readouterr().out.splitlines()
    heads = [line[2:] for line in everything if line.startswith("  ")]
    for verb in VERBS:
        assert [head for head in heads if head.startswith(f"{verb.name} ".rstrip())], verb.name
    assert main(["sandbox", "--help"]) == 0
    shown = capfd.readouterr().out
    assert all(f"  {name} " in shown for name in BY_NAME if name.startswith("sandbox "))
    assert main(["help", "sandbox", "run"]) == 0
    assert main(["help", "nothing"]) == 2


def test_flags_of_every_verb_may_come_first(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "version"]) == 0 and main(["--context", "x", "version"]) == 0
    assert main(["--context=x", "--debug", "version", "--json"]) == 0
    assert main(["--debug", "help", "run"]) == 0 and main(["--debug"]) == 0
    assert "Run a command" in capfd.readouterr().out
    assert main(["--debug", "sandbox", "creat"]) == 1 and loads(capfd.readouterr().out)["ok"] is False
    assert main(["--debug", "sb", "creat"]) == 1 and loads(capfd.readouterr().out)["ok"] is False
    assert main(["--nothing", "run"]) == 2
    verb, rest, moved = find(["--endpoint", "h:1", "run", "ls", "--debug"])
    assert verb is BY_NAME["run"] and (rest, moved) == (["ls", "--debug"], ["--endpoint", "h:1"])


def test_cp_between_two_places_of_one_side_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "a", "b"]) == 2 and main(["cp", "a:/x", "b:/y"]) == 2 and main(["cp", "a", "b:"]) == 2
    assert "REF:/workspace" in capfd.readouterr().err


def test_the_catalog_names_every_sandbox_verb(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "catalog"]) == 0
    answer = loads(capfd.readouterr().out)
    assert answer["catalog_version"] == 1
    names = {command["name"] for command in answer["commands"]}
    assert names == {name.split(" ", 1)[1] for name in BY_NAME if name.startswith("sandbox ")}
    run = next(command for command in answer["commands"] if command["name"] == "run")
    assert {"name": "--raw", "usage": run["flags"][4]["usage"]} in run["flags"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "sandbox" in capfd.readouterr().out


def test_the_bash_completion_completes(capfd: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capfd.readouterr().out
    ask = script + '\nCOMP_WORDS=(atoll sandbox de); COMP_CWORD=2; _atoll; echo "${COMPREPLY[@]}"'
    assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60).stdout.strip() == "destroy"


def test_text_is_safe_for_terminals() -> None:
    hostile = "a\x1b]0;title\x07\x1b[2Jb\x9bc\r\u202ed\x7f"
    assert all(c in "\n\t" or ord(c) >= 32 for c in safe(hostile))
    for bad in ("\x1b", "\x07", "\x9b", "\u202e", "\x7f", "\r"):
        assert bad not in safe(hostile)
    assert safe("plain é 漢\n\ttext") == "plain é 漢\n\ttext"
    assert b"\x1b" not in safe_bytes(b"\x1b[31m\xff\n") and safe_bytes(b"ok\r\n") == b"ok\n"


def test_a_broken_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m atoll help; echo $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"( {command} ) | true"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_a_directory_that_is_gone_is_told_as_that(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "scripts" / "atoll"
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} {program} run true"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": SOURCE, "ATOLL_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 125 and "does not exist any more" in done.stderr and "Traceback" not in done.stderr
