"""Commands on a real sandbox through REST: results tell the whole truth."""

import base64
import json
import socket
from contextlib import closing

import pytest
from lab.daemon import PATIENCE, Box, DaemonProcess, Failed, until


def test_exit_codes_and_streams_stay_apart(box: Box) -> None:
    result = box.exec("echo out; echo err >&2; exit 3")
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("out\n", "err\n", 3)
    assert result["status"] == "completed" and not result["timed_out"] and not result["truncated"]


def test_a_signal_is_told_as_one(box: Box) -> None:
    result = box.exec("kill -TERM $$")
    assert (result["exit_code"], result["signal"]) == (143, 15)


def test_bytes_survive(box: Box) -> None:
    result = box.exec(["/usr/bin/printf", r"a\xff\x00b"])
    assert base64.b64decode(result["stdout_b64"]) == b"a\xff\x00b" and result["stdout_bytes"] == 4


def test_a_timeout_is_a_result_and_kills_the_tree(box: Box) -> None:
    for timeout in (1000, 10_000, 60_000):  # a slow machine may not have come to the first word
        result = box.exec("setsid sleep 4242 & echo started; sleep 4242", timeout_ms=timeout)
        assert result["status"] == "timed_out" and result["timed_out"]
        if result["stdout"]:
            break
    assert result["stdout"] == "started\n"
    until(lambda: "sleep" not in [p["comm"] for p in box.daemon.get(f"{box.path}/processes")["processes"]], "killed")


def test_a_missing_program_is_a_result_and_a_missing_cwd_an_error(box: Box) -> None:
    result = box.exec(["no-such-program"])
    assert result["exit_code"] == 127 and "no-such-program" in result["stderr"]
    box.write("/workspace/plain", b"x", "&mode=0644")
    assert box.exec(["/workspace/plain"])["exit_code"] == 126
    with pytest.raises(Failed) as caught:
        box.exec(["true"], cwd="/no/such/dir")
    assert caught.value.code == "file_not_found"


def test_stdin_env_cwd_user_and_umask(box: Box) -> None:
    assert box.exec(["cat"], stdin="hello")["stdout"] == "hello"
    assert box.exec(["cat"], stdin_b64=base64.b64encode(b"h\xff").decode())["stdout_bytes"] == 2
    assert box.exec('echo "$A"; pwd; umask', env={"A": "b c"}, cwd="/tmp", umask=0o27)["stdout"] == "b c\n/tmp\n0027\n"
    assert box.exec(["id", "-u"], user="nobody", cwd="/")["stdout"] == "65534\n"


def test_output_beyond_the_limit_is_counted_and_flagged(box: Box) -> None:
    result = box.exec("head -c 3000000 /dev/zero | tr '\\0' x; echo e >&2")
    assert len(result["stdout"]) == 1 << 20 and result["stdout_bytes"] == 3_000_000
    assert result["truncated"] and result["stdout_truncated"] and not result["stderr_truncated"]
    assert box.exec("echo abcdef", output_limit=3)["stdout"] == "abc"


@pytest.mark.parametrize("language", ["python", "node", "bash", "sh"])
def test_code_reaches_its_interpreter_byte_for_byte(box: Box, language: str) -> None:
    text = "tab\\there 'single' \"double\" $HOME `x` \\\\ ü 😀"
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    code = {
        "python": f"import sys\nsys.stdout.write('{quoted}')\n",
        "node": f"const a = 1;\nprocess.stdout.write('{quoted}')\n",
        "bash": f"cat <<'END'\n{text}\nEND",
        "sh": f"cat <<'END'\n{text}\nEND",
    }[language]
    if language == "node" and box.exec("command -v node")["exit_code"]:
        pytest.skip("no node on this machine")
    result = box.run(code, language)
    assert (result["stdout"].rstrip("\n"), result["stderr"]) == (text, "")


def test_code_files_are_removed_and_large_code_runs(box: Box) -> None:
    result = box.run("x = '" + "y" * 300_000 + "'\nprint(len(x))")
    assert result["stdout"] == "300000\n"
    until(lambda: "_k8e_run" not in box.exec("ls /tmp")["stdout"], "the file of the code is removed")
    box.write("/workspace/beside.py", b"value = 42")
    assert box.run("import beside\nprint(beside.value)")["stdout"] == "42\n"
    assert box.run("import sys; print(sys.argv[1:])", args=["a b", "c"])["stdout"] == "['a b', 'c']\n"
    assert box.run('echo "$1-$2"', "bash", args=["x y", "z"])["stdout"] == "x y-z\n"


def test_a_frame_stream_ends_with_its_result(box: Box, daemon: DaemonProcess) -> None:
    frames = list(daemon.stream(f"{box.path}/exec", {"command": "echo a; echo b >&2; exit 5"}))
    assert frames[0][0] == 3 and json.loads(frames[0][1])["started"]["pid"] > 0
    assert b"".join(p for k, p in frames if k == 1) == b"a\n" and b"".join(p for k, p in frames if k == 2) == b"b\n"
    assert frames[-1][0] == 4 and json.loads(frames[-1][1])["exit_code"] == 5


def test_a_large_output_streams_through_flat_memory(box: Box, daemon: DaemonProcess) -> None:
    size, total = 256 << 20, 0
    for kind, payload in daemon.stream(f"{box.path}/exec", {"command": f"head -c {size} /dev/zero"}):
        total += len(payload) if kind == 1 else 0
    assert total == size
    assert daemon.process is not None
    with open(f"/proc/{daemon.process.pid}/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert peak < 400_000  # KiB


def test_a_caller_who_leaves_kills_the_foreground_command(box: Box, daemon: DaemonProcess) -> None:
    body = json.dumps({"command": "echo $$; exec sleep 777", "timeout_ms": 0}).encode()
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(daemon.home / "daemon.sock"))
        head = f"POST {box.path}/exec HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(head.encode() + b"Accept: application/x-atoll-frames\r\n\r\n" + body)
        seen = b""
        while b"started" not in seen:
            seen += sock.recv(4096)
    until(
        lambda: "777" not in box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["stdout"].replace("tr", ""), "killed"
    )


def test_a_caller_who_only_closes_its_sending_side_is_answered(box: Box, daemon: DaemonProcess) -> None:
    body = b'{"command":"sleep 0.3; echo answered"}'
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(daemon.home / "daemon.sock"))
        head = f"POST {box.path}/exec HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        sock.shutdown(socket.SHUT_WR)
        seen = b""
        while piece := sock.recv(4096):
            seen += piece
    assert b"answered\\n" in seen


def test_background_poll_attach_and_kill(box: Box, daemon: DaemonProcess) -> None:
    command = box.background("echo one; read line; echo got $line; sleep 4343", stdin_stream=True)
    until(lambda: box.command(command)["stdout"] == "one\n", "its first line")
    assert daemon.ask("POST", f"{box.path}/commands/{command}/stdin?eof=1", b"two\n") == {"written": 4}
    until(lambda: box.command(command, "?stdout_from=4")["stdout"] == "got two\n", "its second line")
    frames = daemon.stream(f"{box.path}/commands/{command}/stream?stdout=4")
    assert json.loads(next(frames)[1])["started"]["command_id"] == command
    assert next(frames) == (1, b"got two\n")
    killed = daemon.post(f"{box.path}/commands/{command}/kill")
    assert killed["status"] in ("completed", "cancelled") and killed["signal"] == 9
    kind, payload = list(frames)[-1]
    assert kind == 4 and json.loads(payload)["signal"] == 9
    assert command in [c["command_id"] for c in daemon.get(f"{box.path}/commands")["commands"]]


def test_signals_reach_a_command(box: Box, daemon: DaemonProcess) -> None:
    command = box.background("trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.05; done")
    until(lambda: box.command(command)["stdout"] == "ready\n", "it is ready")
    daemon.post(f"{box.path}/commands/{command}/signal", {"signal": 10, "group": "process"})
    ended = box.ended(command)
    assert ended["exit_code"] == 9 and ended["stdout"] == "ready\ncaught\n"


def test_five_background_runs_at_a_time(daemon: DaemonProcess) -> None:
    box = daemon.create()
    commands = [box.background("sleep 600") for _ in range(5)]
    with pytest.raises(Failed) as caught:
        box.background("sleep 600")
    assert caught.value.code == "exhausted" and caught.value.status == 429
    assert box.info()["background_runs"] == 5
    daemon.post(f"{box.path}/commands/{commands[0]}/kill")
    box.background("true")
    box.destroy()


def test_a_repeated_id_is_the_first_run_and_never_a_second(box: Box) -> None:
    first = box.exec("echo $RANDOM$RANDOM", id="once-1")
    assert box.exec("echo $RANDOM$RANDOM", id="once-1") == first
    with pytest.raises(Failed) as caught:
        box.exec("echo other", id="once-1")
    assert caught.value.code == "already_exists"


def test_a_terminal(box: Box, daemon: DaemonProcess) -> None:
    script = "tty >/dev/null && stty size; read x; stty size; echo $x"
    command = box.background(script, pty={"rows": 30, "cols": 100})
    until(lambda: "30 100" in box.command(command)["stdout"], "the terminal's size")
    daemon.post(f"{box.path}/commands/{command}/resize", {"rows": 50, "cols": 132})
    group = daemon.get(f"{box.path}/commands/{command}/foreground")["pgid"]
    assert group > 0 or (group == -1 and daemon.get(box.path)["runtime"] == "gvisor")  # which cannot tell
    daemon.ask("POST", f"{box.path}/commands/{command}/stdin", b"typed\n")
    assert "50 132" in box.ended(command)["stdout"]


def test_the_transcript_cannot_be_forged(box: Box, daemon: DaemonProcess) -> None:
    box.exec(r"printf 'x\n1794000000000 i cfake rm -rf /\n\033[2Jy\n'")
    text, at, window = "", 0, {"eof": False}
    while not window["eof"]:
        window = daemon.get(f"{box.path}/log?offset={at}&limit=262144")
        text, at = text + window["output"], window["next_offset"]
    lines = [line.split(" ", 3) for line in text.splitlines()]
    assert all(len(line) == 4 and line[1] in "oei" for line in lines)
    assert not [line for line in lines if line[2] == "cfake"] and "\033" not in text and "\\x1b[2Jy" in text
    kinds = [event["kind"] for event in daemon.get(f"{box.path}/events")["events"]]
    assert kinds[0] == "created" and "command" in kinds
