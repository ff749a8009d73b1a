"""The SDK on real sandboxes, both faces: results, streams, background commands, terminals, ports, lifecycle, errors."""

import os
import signal
from typing import Any

import pytest

from atoll.client.results import ExecResult, Output, Started
from atoll.errors import (
    AlreadyExists,
    AtollError,
    FileNotFound,
    InvalidArgument,
    NotFound,
    SandboxGone,
)


def test_run_is_python_by_default(sandbox: Any) -> None:
    result = sandbox.run("import sys; print('hi'); print('err', file=sys.stderr); sys.exit(3)")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("hi\n", "err\n", 3, False)
    assert result.status == "completed" and result.duration_ms >= 0 and result.command_id.startswith("c")
    assert sandbox.run("echo $0 $1", "bash", args=["a b"]).ok
    assert (
        sandbox.run("import os; print(os.environ['A'], os.getcwd())", env={"A": "1"}, cwd="/tmp").stdout == "1 /tmp\n"
    )


def test_exec_takes_argv_or_a_shell_line(sandbox: Any) -> None:
    assert sandbox.exec(["printf", "%s", "$HOME"]).stdout == "$HOME"
    assert sandbox.exec("echo $((6*7)) | tr 2 3").stdout == "43\n"
    assert sandbox.exec(["cat"], stdin="text").stdout == "text"
    assert sandbox.exec(["id", "-u"], user="nobody").stdout == "65534\n"
    assert sandbox.exec("umask", umask=0o027).stdout.strip().endswith("027")


def test_bytes_come_back_exactly(sandbox: Any) -> None:
    data = bytes(range(256)) * 10
    result = sandbox.exec(["cat"], stdin=data)
    assert result.raw_stdout == data and result.stdout_bytes == len(data)


def test_output_beyond_the_limit_is_marked(sandbox: Any) -> None:
    result = sandbox.exec("head -c 100000 /dev/zero | tr '\\0' x", output_limit=1000)
    assert (
        result.truncated and result.stdout_truncated and len(result.stdout) <= 1000 and result.stdout_bytes == 100_000
    )


def test_ways_to_end(sandbox: Any) -> None:
    late = sandbox.exec("echo before; sleep 60", timeout=3)
    assert late.timed_out and late.status == "timed_out" and late.stdout == "before\n"
    killed = sandbox.exec("kill -9 $$")
    assert killed.signal == 9 and killed.exit_code == 137
    missing = sandbox.exec(["no-such-program"])
    assert missing.exit_code == 127 and missing.stderr


def test_stream_gives_pieces_and_then_the_result(sandbox: Any) -> None:
    items = list(sandbox.stream("echo one; echo two >&2; exit 4"))
    assert isinstance(items[0], Started) and isinstance(items[-1], ExecResult)
    assert items[-1].exit_code == 4
    text = {
        name: b"".join(i.data for i in items if isinstance(i, Output) and i.stream == name)
        for name in ("stdout", "stderr")
    }
    assert text == {"stdout": b"one\n", "stderr": b"two\n"}
    code = list(sandbox.stream("print(1)\nprint(2)", language="python"))
    assert b"".join(i.data for i in code if isinstance(i, Output)) == b"1\n2\n"


def test_a_stream_that_is_closed_kills_its_command(sandbox: Any) -> None:
    stream = sandbox.stream("echo up; sleep 7654", timeout=None)
    for item in stream:
        if isinstance(item, Output):
            break
    stream.close()
    sandbox.exec("while pgrep -f '^sleep 7654' >/dev/null; do sleep 0.05; done", timeout=60)
    assert not [p for p in sandbox.processes() if p.comm == "sleep"]


def test_background_commands(sandbox: Any) -> None:
    command = sandbox.start("read line; echo got $line; read line; exit $line", stdin_stream=True)
    assert command.poll().running and command.pid
    command.stdin("hello\n")
    for item in command.attach():
        if isinstance(item, Output):
            assert item.data == b"got hello\n"
            break
    again = sandbox.command(command.id)
    assert again.poll().running
    again.stdin("5\n", eof=True)
    result = command.wait()
    assert (result.exit_code, result.stdout, again.output()) == (5, "got hello\n", "got hello\n")
    assert command.wait().exit_code == 5  # waiting for what has ended
    listed = {info.command_id: info for info in sandbox.commands()}
    assert listed[command.id].exit_code == 5 and listed[command.id].background
    replay = list(command.attach(stdout=4))
    assert b"".join(i.data for i in replay if isinstance(i, Output)) == b"hello\n"


def test_signals_and_kill(sandbox: Any) -> None:
    asked = sandbox.start("trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.05; done")
    for item in asked.attach():
        if isinstance(item, Output):
            break
    asked.signal(signal.SIGTERM, group="process")
    assert asked.wait().exit_code == 9
    forced = sandbox.start(["sleep", "6543"])
    forced.kill()
    assert forced.wait().signal == 9
    with pytest.raises(AtollError):
        forced.signal(signal.SIGTERM)
    with pytest.raises(NotFound):
        sandbox.command("cnothing")


def test_a_terminal(sandbox: Any) -> None:
    terminal = sandbox.pty(["sh"], rows=33, cols=99)
    terminal.write("stty size; echo mark-$((1+1))\n")
    seen = b""
    for piece in terminal:
        seen += piece
        if b"mark-2" in seen and b"33 99" in seen:
            break
    terminal.resize(44, 88)
    terminal.write("stty size; exit 6\n")
    for piece in terminal:
        seen += piece
    assert b"44 88" in seen and terminal.result.exit_code == 6
    with sandbox.pty(["sleep", "5432"]) as closed:
        assert closed.id
    sandbox.exec("while pgrep -f '^sleep 5432' >/dev/null; do sleep 0.05; done", timeout=60)


SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    conn, _ = server.accept()
    data = b""
    while piece := conn.recv(65536):
        data += piece
    conn.sendall(data[::-1])
    conn.close()
"""


def test_a_port_inside(sandbox: Any) -> None:
    server = sandbox.start(SERVER, language="python")
    line = b""
    for item in server.attach():
        if isinstance(item, Output):
            line += item.data
            if line.endswith(b"\n"):
                break
    data = os.urandom(300_000)
    with sandbox.forward(int(line)) as tunnel:
        for start in range(0, len(data), 50_000):
            tunnel.send(data[start : start + 50_000])
        tunnel.send_eof()
        back = b""
        while piece := tunnel.recv():
            back += piece
    assert back == data[::-1]
    server.kill()
    with pytest.raises(AtollError):
        sandbox.forward(int(line))
    for port in (0, -1, 65536, "80"):
        with pytest.raises(InvalidArgument):
            sandbox.forward(port)


def test_info_list_connect_and_destroy(face: Any) -> None:
    name = f"sdk-{os.urandom(4).hex()}"
    made = face.create(name=name, memory_mb=128, labels={"a": "b"}, env={"X": "y"}, lifetime=3600, idle_timeout=600)
    info = made.info()
    assert (info.id, info.name, info.state, info.labels) == (made.id, name, "running", {"a": "b"})
    assert info.limits["memory_mb"]["value"] == 128 and info.idle_timeout_s == 600
    assert made.id in [item.id for item in face.list()]
    with face.connect(name) as same:
        assert same.exec("echo $X").stdout == "y\n"
    assert made.info().state == "running"  # leaving a connected one ends nothing
    with pytest.raises(AlreadyExists):
        face.create(name=name)
    assert made.extend(7200).expires_at > info.expires_at
    made.destroy()
    made.destroy()
    with pytest.raises(SandboxGone) as gone:
        made.run("1")
    assert gone.value.details.get("reason")
    with pytest.raises(NotFound):
        face.connect("no-such-sandbox")
    made.close()


def test_leaving_the_context_destroys_and_entering_creates(face: Any) -> None:
    with face() as made:
        identity = made.id
        made.files.write("x", "1")
    assert identity not in [item.id for item in face.list()]
    ended = {item.id: item for item in face.list(state="ended")}
    assert ended[identity].end["kind"] == "destroyed"


def test_pause_and_stop(face: Any) -> None:
    with face() as made:
        made.files.write("kept", "1")
        assert made.pause().state == "paused"
        assert made.resume().state == "running"
        assert made.stop().state == "stopped"
        assert made.restart().state == "running"
        assert made.files.read("kept") == b"1"


def test_history(face: Any) -> None:
    with face() as made:
        made.exec("echo remember-me")
        assert "remember-me" in made.log()["output"]
        assert made.events()[0]["kind"] == "created"


@pytest.mark.parametrize(
    "call",
    [
        lambda box: box.run(""),
        lambda box: box.run("1", timeout=0),
        lambda box: box.run("1", timeout=-1),
        lambda box: box.run("1", timeout=float("nan")),
        lambda box: box.run("1", timeout=10**8),
        lambda box: box.exec([]),
        lambda box: box.exec(["a\0b"]),
        lambda box: box.exec(["echo", "\udcff"]),
        lambda box: box.exec("  "),
        lambda box: box.exec("x", env={"A=B": "c"}),
        lambda box: box.exec("x", user="../etc"),
        lambda box: box.exec("x", output_limit=-1),
        lambda box: box.run(b"bytes"),
        lambda box: box.files.read("a\0b"),
        lambda box: box.files.write("", b""),
        lambda box: box.files.grep(""),
        lambda box: box.command(""),
    ],
)
def test_bad_input_is_invalid_argument(sandbox: Any, call: Any) -> None:
    with pytest.raises(InvalidArgument):
        call(sandbox)


def test_a_missing_working_directory_is_an_error(sandbox: Any) -> None:
    with pytest.raises(FileNotFound):
        sandbox.exec("true", cwd="/no/such/place")
    assert sandbox.exec("echo alive").stdout == "alive\n"
