"""write, read, list, ps, log, events on a real sandbox; wrong input of every kind is a typed error and harms nothing."""

import json
import os
import time

import pytest

from .conftest import Cli


def test_k8e_P14_files(cli: Cli, box: str) -> None:
    path = "/workspace/dir/notes.txt"
    assert cli.ok("sandbox", "write", box, path, stdin=b"one\n")["ok"] is True
    assert cli.ok("sandbox", "write", box, path, "--mode", "a", stdin=b"two\n") | {"bytes": 0} == {
        "ok": True, "path": path, "bytes": 0,
    }  # fmt: skip
    assert cli.ok("sandbox", "read", box, path) == {"content": "one\ntwo\n", "path": path}
    assert cli("sandbox", "read", box, path, "--raw").stdout == b"one\ntwo\n"
    cli.ok("sandbox", "write", box, path, stdin=b"new")
    assert cli("sandbox", "read", box, path, "--raw").stdout == b"new"
    listed = {item["path"]: item["modified"] for item in cli.ok("sandbox", "list", box)["files"]}
    assert abs(listed[path] - time.time()) < 3600
    later = cli.ok("sandbox", "list", box, "--since", str(int(time.time()) + 5000))
    assert later["files"] == []
    earlier = cli.ok("sandbox", "list", box, "--since", str(int(time.time()) - 3600))
    assert path in [item["path"] for item in earlier["files"]]
    assert cli("sandbox", "write", box, path, "--mode", "x").json["error"] == "invalid_argument"


def test_k8e_D05_binary_files_pass_intact(cli: Cli, box: str) -> None:
    data = os.urandom(3_000_000)
    cli.ok("sandbox", "write", box, "/workspace/bin", stdin=data)
    assert cli("sandbox", "read", box, "/workspace/bin", "--raw").stdout == data
    import base64

    assert base64.b64decode(cli.ok("sandbox", "read", box, "/workspace/bin")["content_b64"]) == data


def test_k8e_D12_a_fresh_workspace_is_empty(cli: Cli) -> None:
    session = cli.ok("sandbox", "create")["session_id"]
    try:
        assert cli.ok("sandbox", "list", session) == {"files": []}
        cli.ok("sandbox", "run", "print(1)\nprint(2)", "--lang", "python", "--session-id", session)
        assert cli.ok("sandbox", "list", session) == {"files": []}
    finally:
        cli("sandbox", "destroy", session)


@pytest.mark.parametrize(
    "name", ["a b", "ü漢", "-dash", "quo'te\"", "new\nline", "per%2fcent", "a?b&c=d#e", "tab\t", "*"]
)
def test_k8e_D07_odd_names_round_trip(cli: Cli, box: str, name: str) -> None:
    path = f"/workspace/odd/{name}"
    cli.ok("sandbox", "write", box, path, stdin=name.encode())
    assert cli("sandbox", "read", box, path, "--raw").stdout == name.encode()
    assert path in [item["path"] for item in cli.ok("sandbox", "list", box)["files"]]


def test_k8e_D07_a_name_of_any_bytes(cli: Cli, box: str) -> None:
    path = os.fsdecode(b"/workspace/b\xff\xfe")
    cli.ok("sandbox", "write", box, path, stdin=b"x")
    assert cli("sandbox", "read", box, path, "--raw").stdout == b"x"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["read", "{}", "/workspace/missing"], "file_not_found"),
        (["read", "{}", "/workspace"], "is_a_directory"),
        (["read", "{}", ""], "invalid_argument"),
        (["read", "{}", "/workspace/" + "n" * 300], None),
        (["read", "{}", "/" + "long/" * 2000], None),
        (["write", "{}", "/proc/version"], None),
        (["write", "{}", "/workspace"], None),
        (["read", "no-such-box", "/workspace/x"], "not_found"),
        (["get", "sess-aaaaaaaaaaaaaaaaaaaa"], "not_found"),
        (["get", "../../etc"], "not_found"),
        (["get", "a/b"], "not_found"),
        (["get", ".."], "invalid_argument"),
        (["get", ""], "invalid_argument"),
        (["get", "é\udcff"], "invalid_argument"),
        (["destroy", "healthcheck-probe-noop"], "not_found"),
        (["ps", "nobody"], "not_found"),
        (["log", "nobody"], "not_found"),
        (["events", "nobody"], "not_found"),
        (["log", "{}", "--offset", "-5"], "invalid_argument"),
        (["events", "{}", "--limit", "0"], "invalid_argument"),
        (["run", "", "--session-id", "{}"], "invalid_argument"),
        (["run", "   ", "--session-id", "{}"], "invalid_argument"),
        (["run", "true", "--timeout", "-1", "--session-id", "{}"], "invalid_argument"),
        (["run", "true", "--timeout", "0", "--session-id", "{}"], "invalid_argument"),
        (["run", "true", "--timeout", "99999999", "--session-id", "{}"], "invalid_argument"),
        (["run", "true", "--timeout", "1e400", "--session-id", "{}"], "invalid_argument"),
        (["run", "echo \udcff", "--session-id", "{}"], "invalid_argument"),
        (["run", "true", "--tenant", "../.."], "invalid_argument"),
        (["run", "true", "--tenant", "a/b"], "invalid_argument"),
        (["run", "true", "--env", "=x", "--session-id", "{}"], "invalid_argument"),
        (["create", "--name", "a/b"], "invalid_argument"),
        (["create", "--name", ".."], "invalid_argument"),
        (["create", "--name", "x" * 300], "invalid_argument"),
        (["create", "--memory", "-1"], "invalid_argument"),
        (["create", "--memory", "1"], "invalid_argument"),
        (["create", "--cpus", "0"], "invalid_argument"),
        (["create", "--runtime", "nosuch"], None),
        (["create", "--lifetime", "-3"], "invalid_argument"),
        (["create", "--image", "nosuch-image-at-all"], None),
        (["create", "--session-id", "../x"], "invalid_argument"),
    ],
)
def test_k8e_P26_P27_bad_input_is_a_typed_error(cli: Cli, box: str, words: list[str], code: str | None) -> None:
    done = cli("sandbox", *[box if word == "{}" else word for word in words], stdin=b"x")
    assert done.code in (1, 8), done
    answer = done.json
    assert answer["ok"] is False and answer["error"] and answer["detail"]
    assert answer["error"] != "internal", answer
    if code:
        assert answer["error"] == code, answer


def test_the_sandbox_bore_all_that(cli: Cli, box: str) -> None:
    assert cli.ok("sandbox", "run", "echo alive", "--session-id", box)["stdout"] == "alive\n"


def test_no_code_at_all_is_an_error(cli: Cli, box: str) -> None:
    assert cli("sandbox", "run", "--session-id", box, stdin=b"").json["error"] == "invalid_argument"


def test_a_missing_interpreter_is_the_commands_failure(cli: Cli, box: str) -> None:
    done = cli("sandbox", "run", "/no/such/program", "--session-id", box)
    assert (done.code, done.json["exit_code"]) == (127, 127) and done.json["stderr"]


def test_k8e_D08_processes(cli: Cli, box: str) -> None:
    cli.ok("sandbox", "run", "sleep 4321 & sleep 4322 & disown -a", "--session-id", box)
    found = {
        p["cmdline"] if isinstance(p["cmdline"], str) else " ".join(p["cmdline"]): p
        for p in cli.ok("sandbox", "ps", box)["processes"]
    }
    lines = [line for line in found if "432" in line]
    assert len(lines) == 2, found
    for line in lines:
        assert found[line]["comm"] == "sleep" and found[line]["state"] in "RSD" and found[line]["pid"] > 1


def test_k8e_D14_log_and_events(cli: Cli) -> None:
    session = cli.ok("sandbox", "create")["session_id"]
    cli.ok("sandbox", "run", "echo find-me; printf '\\033]0;evil\\007\\n'", "--session-id", session)
    log = cli("sandbox", "log", session)
    assert log.code == 0 and b"find-me" in log.stdout
    assert all(byte >= 32 or byte in (9, 10) for byte in log.stdout)  # ESC-16
    assert len(cli("sandbox", "log", session, "--limit", "60").stdout) <= 200
    cli.ok("sandbox", "destroy", session)
    answer = cli.ok("sandbox", "events", session)
    kinds = [event["kind"] for event in answer["events"]]
    assert kinds[0] == "created" and kinds[-1] == "ended" and answer["returned"] == len(kinds)
    assert {event["sandbox_id"] for event in answer["events"]} == {session.removeprefix("sess-")}
    assert cli.ok("sandbox", "events", "--limit", "3")["returned"] <= 3


def test_hostile_names_cannot_reach_the_terminal(cli: Cli, box: str) -> None:
    """ESC-16: whatever a file is called, what is printed holds no byte below 0x20 but newline and tab."""
    cli.ok("sandbox", "run", "touch $'/workspace/x\\e]0;pwn\\a' $'/workspace/y\\e[2J'", "--session-id", box)
    for words in (["list", box], ["read", box, "/workspace/x\x1b]0;no\x07"]):
        done = cli("sandbox", *words)
        assert all(byte >= 32 or byte in (9, 10) for byte in done.stdout + done.stderr), done
    missing = cli("cp", f"{box}:/workspace/z\x1b[31m", "/nonexistent/x")
    assert b"\x1b" not in missing.stderr and missing.code == 125


def test_every_answer_is_one_line_of_json(cli: Cli, box: str) -> None:
    for words in (["list"], ["sessions"], ["get", box], ["status"], ["ps", box], ["events", box], ["catalog"]):
        done = cli("sandbox", *words)
        assert done.code == 0 and done.stdout.count(b"\n") == 1 and isinstance(json.loads(done.stdout), dict), words
