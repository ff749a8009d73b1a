"""The parts of core that need no sandbox: kept output, transcripts, the store, settings, languages."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import config, errors, model
from atoll.core.commands import languages
from atoll.core.commands.history import CAP, History, escape
from atoll.core.commands.output import TAIL, Kept, Output
from atoll.core.store.records import Store
from atoll.core.store.sqlite import SqliteDatabase


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_kept_output_is_the_beginning_and_counts_all(pieces: list[bytes], limit: int) -> None:
    whole, kept = b"".join(pieces), Kept(limit)
    for piece in pieces:
        kept.add(piece)
    assert kept.first() == whole[:limit] and kept.total == len(whole)
    assert kept.truncated == (len(whole) > limit)


def test_a_file_keeps_output_across_a_restart(tmp_path: Path) -> None:
    first = Kept(10, tmp_path / "c.1")
    first.add(b"abcdef")
    again = Kept(10, tmp_path / "c.1")  # the daemon before was killed: nothing was closed
    assert (again.total, again.first()) == (6, b"abcdef")
    again.add(b"ghijkl")
    assert again.first() == b"abcdefghij" and again.total == 12 and again.truncated
    assert again.read(8) == (8, b"ij") and again.read(10) == (10, b"kl")
    first.close()
    again.close()
    assert again.first() == b"abcdefghij"
    again.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_what_was_lost_is_never_joined(tmp_path: Path) -> None:
    kept = Kept(100, tmp_path / "c.1")
    kept.add(b"abc")
    kept.skip(5)
    kept.add(b"xyz")
    assert kept.first() == b"abc" and kept.total == 11 and kept.truncated
    assert kept.read(3) == (8, b"xyz")
    kept.close()


async def test_a_follower_sees_everything_or_is_told_the_offset(tmp_path: Path) -> None:
    output = Output(1000, tmp_path, "c")
    got: list[tuple[int, int, bytes]] = []

    async def follow() -> None:
        async for item in output.follow({1: 0, 2: 0}):
            got.append(item)

    task = asyncio.create_task(follow())
    for number in range(100):
        output.add(1, b"%04d" % number)
        if number % 10 == 0:
            await asyncio.sleep(0)
    output.finish()
    await asyncio.wait_for(task, 30)
    assert b"".join(data for _, _, data in got) == b"".join(b"%04d" % n for n in range(100))
    late = Output(10, tmp_path, "d")
    late.add(1, b"x" * (5 * TAIL))
    late.finish()
    seen = [item async for item in late.follow({1: 0, 2: 0})]
    assert seen[0] == (1, 0, b"x" * 10) and seen[1][1] > 10 and seen[-1][1] + len(seen[-1][2]) == 5 * TAIL


async def test_a_transcript_has_a_cap_and_whole_lines(tmp_path: Path) -> None:
    store = Store(SqliteDatabase(tmp_path / "db"))
    history = History(store, tmp_path / "t")
    line = "x" * 1000 + "\n"
    for _ in range(CAP // 1001 + 200):
        history.append("s", line)
    assert (tmp_path / "t" / "s.log").stat().st_size <= CAP
    window = history.window("s", 0, 0)
    assert window["truncated_before"] and window["offset"] > 0
    assert window["output"].startswith("xxx") and window["output"].endswith("\n")
    at = window["offset"]
    while not (window := history.window("s", at, 200_000))["eof"]:
        at = window["next_offset"]
    assert history.window("s", window["next_offset"], 0)["output"] == ""
    assert history.window("unknown", 5, 0)["eof"]
    history.close()
    store.close()


@given(st.text())
def test_escaped_text_is_one_harmless_line(text: str) -> None:
    escaped = escape(text)
    assert len(escaped.splitlines()) <= 1
    assert not {"\n", "\r", "\x1b", "\u202e", "\x9b"} & set(escaped)


async def test_late_writes_are_seen_by_every_question(tmp_path: Path) -> None:
    store = Store(SqliteDatabase(tmp_path / "db"))
    row = {"argv": ["x"], "language": None, "background": False, "body": "", "spec": {}, "started_at": 1.0}
    store.add_command("s", "c", row)
    store.later(lambda: store.update_command("s", "c", status="completed"))
    found = store.command("s", "c")
    assert found is not None and found["status"] == "completed"
    with pytest.raises(errors.AlreadyExists):
        store.add_command("s", "c", row)
    store.later(lambda: store.update_command("s", "c", status="lost"))
    store.close()
    again = Store(SqliteDatabase(tmp_path / "db"))
    found = again.command("s", "c")
    assert found is not None and found["status"] == "lost"
    again.close()


@pytest.mark.parametrize("text", ["plain", "é\U0001f600\0", "half a pair \ud800", "a byte \udce9"])
def test_any_text_in_a_record_is_read_back(tmp_path: Path, text: str) -> None:
    store = Store(SqliteDatabase(tmp_path / "state.db"))
    row = {"id": "s", "owner": "me", "name": None, "state": "stopped", "runtime": "container", "image": "host",
           "spec": {"labels": {"a": text}}, "created_at": 1.0, "last_active": 1.0,
           "record": {"limits": {"pids": 3}, "policy": {"x": text}, "box": {"y": text}}}  # fmt: skip
    store.add_sandbox(row, [], 9)
    found, (listed,) = store.sandbox("s"), store.list_sandboxes("me", ("stopped",), None)
    assert found is not None and found["record"] == row["record"] and found["spec"] == row["spec"] == listed["spec"]
    assert (listed["record"]["limits"], listed["record"]["policy"]) == ({"pids": 3}, {"x": text})
    store.close()


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    Store(SqliteDatabase(tmp_path / "db")).close()
    with sqlite3.connect(tmp_path / "db") as db:
        db.execute("PRAGMA user_version = 9999")
    with pytest.raises(errors.FailedPrecondition, match="newer"):
        Store(SqliteDatabase(tmp_path / "db"))
    assert (tmp_path / "db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits]\nmemroy_mb = 1", "limits.memory_mb"),
        ("[limit]\n", "limits"),
        ("[sandboxes]\nidle_timeout_s = -1", "sandboxes"),
        ("x = [", "config.toml"),
    ],
)
def test_wrong_settings_name_the_right_ones(text: str, said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        config.parse(text)


def test_settings_others_can_write_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[limits]\nmemory_mb = 64\n")
    (tmp_path / "config.toml").chmod(0o644)
    assert config.load(tmp_path).limits.memory_mb == 64
    (tmp_path / "config.toml").chmod(0o666)
    with pytest.raises(errors.PermissionDenied):
        config.load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "argv"),
    [
        ({"code": "print(1)", "language": "py"}, ["python3", "-c", "print(1)"]),
        ({"code": "1", "language": "JavaScript", "args": ["a"]}, ["node", "-e", "1", "a"]),
        ({"code": "a\nb", "language": "bash"}, ["bash", "-c", "a\nb"]),
        ({"code": "a\nb", "language": "python"}, ["python3", "/tmp/_k8e_run_c1.py"]),
        ({"code": "-1", "language": "node"}, ["node", "/tmp/_k8e_run_c1.js"]),
        ({"code": "x" * 200_000, "language": "sh"}, ["/bin/sh", "/tmp/_k8e_run_c1.sh"]),
    ],
)
def test_how_code_is_called(fields: dict[str, Any], argv: list[str]) -> None:
    assert languages.call(model.RunSpec(**fields), "c1", "/workspace").argv == argv


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="did you mean `timeout_ms`"):
        model.decode(model.ExecSpec, b'{"argv":["x"],"timeout_msec":1}')


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_no_body_makes_decoding_fail_otherwise(body: bytes) -> None:
    for kind in (model.CreateSandbox, model.ExecSpec, model.RunSpec, model.Sed):
        try:
            model.decode(kind, body)
        except errors.InvalidArgument:
            pass
