"""F2-H6, F2-M5: a person approves all of what runs: shown in full, matched in full, and compared again when it runs."""

from pathlib import Path
from typing import Any

import pytest
from lab.approvals import held
from lab.principals import AGENT, BOSS

from atoll import errors
from atoll.core import Core
from atoll.core.access.approved_text import MAX_SHOWN, visible
from atoll.model import CreateSandbox, ExecSpec, PtySize, RunSpec, convert
from atoll.model.files import ChangeMode, MakeLink, MoveFile, RemoveFile


async def ruled(core: Core, *rules: str, **more: Any) -> str:
    made = await core.sandboxes.create(AGENT, convert(CreateSandbox, {"require_approval": list(rules), **more}))
    return made.id


HIDDEN = "; echo hidden > /tmp/pwned"


async def test_blanks_and_odd_characters_are_made_visible(core: Core) -> None:
    box = await ruled(core, "command:*")
    command = "ls -la" + " " * 1100 + HIDDEN + "\x1b[2K\u202e\u200b\t\r é а⟨2 spaces⟩ \\x1b e\u0301"
    async with held(core, core.commands.exec(AGENT, box, ExecSpec(command=command))) as (asked, _):
        assert asked.action.startswith("ls -la⟨1100 spaces⟩; echo hidden > /tmp/pwned\\x1b[2K\\u202e\\u200b\\t\\r é")
        assert "\\u27e82 spaces\\u27e9" in asked.action, "the caller's own brackets are not ours"
        assert "\\\\x1b" in asked.action and "e\\u0301" in asked.action
        assert all(char.isprintable() for char in asked.action)


async def test_everything_that_decides_what_runs_is_shown(core: Core) -> None:
    box = await ruled(core, "command:*", env={"BASH_ENV": "/workspace/rc", "PLAIN": "1"})
    spec = ExecSpec(
        argv=["bash"], stdin="echo one\n\n\n\n\n  echo two\nuser: root", cwd="/tmp", user="root", env={"A": "b c"}
    )
    async with held(core, core.commands.exec(AGENT, box, spec)) as (asked, _):
        assert asked.action.split("\n") == [
            "bash",
            "user: root",
            "working directory: /tmp",
            "environment: BASH_ENV=/workspace/rc",
            "environment: A=b c",
            "stdin:",
            "  | echo one",
            "  ⟨4 empty lines⟩",
            "  |   echo two",
            "  | user: root",
        ]
    code = RunSpec(code="import os\nos.remove('x')", language="python", args=["-v"])
    async with held(core, core.commands.exec(AGENT, box, code)) as (asked, _):
        lines = asked.action.split("\n")
        assert lines[:3] == ["code:", "  | import os", "  | os.remove('x')"]
        assert "language: python" in lines and "arguments: -v" in lines


async def test_stdin_and_environment_are_matched(core: Core) -> None:
    box = await ruled(core, "command:*rm -rf*", "command:drop *")
    for spec in (
        ExecSpec(argv=["bash"], stdin="cd /tmp\nrm -rf nothing"),
        ExecSpec(argv=["psql"], stdin="select 1;\n  drop table t;"),
        ExecSpec(argv=["ls"], env={"PATH": "/workspace/evil:/usr/bin"}),
        ExecSpec(argv=["ls"], env={"BASH_ENV": "/workspace/rc"}),
        ExecSpec(argv=["ls"], env={"LD_PRELOAD": "/workspace/x.so"}),
        ExecSpec(argv=["python3"], env={"PYTHONSTARTUP": "/workspace/x.py"}),
        ExecSpec(argv=["sh", "-c", "$X"], env={"X": "rm -rf nothing"}),
        ExecSpec(argv=["cat"], stdin_stream=True),
        ExecSpec(argv=["sh"], pty=PtySize()),
        RunSpec(code="import sys", args=["rm -rf nothing"]),
    ):
        async with held(core, core.commands.exec(AGENT, box, spec)):
            assert await core.commands.list(AGENT, box) == [], "nothing has run"
    for spec in (
        ExecSpec(argv=["true"], env={"X": "1", "NODE_ENV": "test"}, cwd="/tmp"),
        ExecSpec(argv=["cat"], stdin="select 1;", cwd="/tmp"),
    ):
        assert (await core.commands.exec(AGENT, box, spec)).exit_code == 0, "what no rule names runs at once"


async def test_what_changed_while_somebody_decided_does_not_run(core: Core, tmp_path: Path) -> None:
    box = await ruled(core, "command:*")
    spec = ExecSpec(command="echo harmless")
    async with held(core, core.commands.exec(AGENT, box, spec)) as (asked, task):
        spec.command = f"touch {tmp_path}/ran"
        await core.approvals.decide(BOSS, asked.id, True)
        with pytest.raises(errors.PermissionDenied, match="not the command that was approved"):
            await task
    assert not (tmp_path / "ran").exists()


async def test_more_than_a_person_can_read_is_refused(core: Core) -> None:
    box = await ruled(core, "command:*")
    for spec in (
        ExecSpec(command="true #" + "x" * MAX_SHOWN),
        ExecSpec(argv=["sh"], stdin="true\n" * MAX_SHOWN),
        ExecSpec(argv=["true"], env={"A": "\x00".replace("\0", "\x01") * MAX_SHOWN}),
    ):
        with pytest.raises(errors.TooLarge, match=str(MAX_SHOWN)):
            await core.commands.exec(AGENT, box, spec)
    assert await core.approvals.pending(BOSS) == []


async def test_a_path_is_judged_where_it_leads(core: Core, tmp_path: Path) -> None:
    """Through links made by the caller, `..` behind a link, and the kernel's own links to the root."""
    (tmp_path / "prod" / "deep").mkdir(parents=True)
    (tmp_path / "prod" / "a").write_text("old")
    box = await ruled(core, f"path:{tmp_path}/prod/*")
    files = core.files
    await files.ask(AGENT, box, "symlink", MakeLink(path=f"{tmp_path}/dir", target="prod"))
    await files.ask(AGENT, box, "symlink", MakeLink(path=f"{tmp_path}/deep", target=f"{tmp_path}/prod/deep"))
    await files.ask(AGENT, box, "symlink", MakeLink(path=f"{tmp_path}/file", target="prod/a"))
    await files.ask(AGENT, box, "symlink", MakeLink(path=f"{tmp_path}/new", target="prod/new"))
    ways = (
        files.write(AGENT, box, f"/proc/self/root{tmp_path}/prod/a", b"new"),
        files.write(AGENT, box, f"{tmp_path}/dir/a", b"new"),
        files.write(AGENT, box, f"{tmp_path}/deep/../a", b"new"),
        files.write(AGENT, box, f"{tmp_path}/file", b"new"),
        files.write(AGENT, box, f"{tmp_path}/new", b"new"),
        files.write(AGENT, box, f"{tmp_path}/dir/x/y", b"new", parents=True),
        files.ask(AGENT, box, "chmod", ChangeMode(path=f"{tmp_path}/file", mode=0o777)),
        files.ask(AGENT, box, "move", MoveFile(src=f"{tmp_path}/dir/a", dst=f"{tmp_path}/b")),
        files.ask(AGENT, box, "remove", RemoveFile(path=f"{tmp_path}/dir/", recursive=True)),
    )
    for way in ways:
        async with held(core, way) as (asked, _):
            assert asked.kind == "write" and f"{tmp_path}/prod" in asked.action
    assert (tmp_path / "prod" / "a").read_text() == "old"
    assert (await files.write(AGENT, box, f"{tmp_path}/dir2", b"free"))["bytes"] == 4


def test_visible_text_is_one_to_one() -> None:
    """No two lines are shown alike."""
    lines = [
        "a b",
        "a  b",
        "a" + " " * 9 + "b",
        "a⟨9 spaces⟩b",
        "a\tb",
        "a\\tb",
        "a\u00a0b",
        "a\u200bb",
        "ab",
        "é",
        "e\u0301",
    ]
    assert len({visible(line) for line in lines}) == len(lines)
