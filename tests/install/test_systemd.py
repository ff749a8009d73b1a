"""What a daemon started by systemd does: it serves on a socket it was passed, tells its state, and writes to the journal.

No systemd runs here as the first process: `systemd-socket-activate` and sockets of the test stand in for it, as the real thing would.
"""

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.command_line import WAIT, Cli
from lab.sandboxes import SOURCE
from lab.waiting import until

from atoll.server import systemd

ROOT = Path(SOURCE).parent
UNITS = ROOT / "deploy" / "systemd"


@pytest.fixture
def home() -> Iterator[Cli]:
    made = Cli(tempfile.mkdtemp(prefix="ats-"))
    yield made
    made("daemon", "stop", "--force")
    shutil.rmtree(made.home, ignore_errors=True)


@pytest.fixture
def passed(home: Cli) -> Iterator[socket.socket]:
    """The daemon's socket, held by somebody else, as atoll.socket holds it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{home.home}/daemon.sock")
        sock.listen(64)
        yield sock


def serve(home: Cli, passed: socket.socket, **env: str) -> "subprocess.Popen[bytes]":
    """Become the service as systemd would start it: the socket is descriptor 3, and the variables name this process."""
    script = f'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@" 3<&{passed.fileno()}'
    words = ["bash", "-c", script, "bash", *home.command("serve", "--grpc", "none")]
    return subprocess.Popen(
        words, env={**home.env, **env}, pass_fds=(passed.fileno(),), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def test_systemd_socket_activate_starts_it_at_the_first_call(home: Cli) -> None:
    program = shutil.which("systemd-socket-activate")
    assert program, "scripts/install-system.sh test installs it"
    command = [program, "--listen", f"{home.home}/daemon.sock", *(f"--setenv={name}" for name in home.env)]
    service = subprocess.Popen(
        [*command, *home.command("serve", "--grpc", "none")],
        env=home.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: Path(home.home, "daemon.sock").exists(), "it never listened")
        assert not Path(home.home, "daemon.lock").exists(), "no daemon before the first call"
        status = home.ok("daemon", "status", "--json")
        assert (status["running"], status["pid"]) == (True, service.pid)
        assert home.ok("sandbox", "run", "echo hello")["stdout"] == "hello\n"
        assert home("daemon", "stop", "--force").code == 0
        assert service.wait(WAIT) == 0
        assert Path(home.home, "daemon.sock").exists(), "the socket is not the daemon's to remove"
    finally:
        service.kill()
        service.wait()


def test_a_client_waits_while_the_service_is_started_again(home: Cli, passed: socket.socket) -> None:
    first = serve(home, passed)
    session = home.ok("sandbox", "create")["session_id"]
    assert home("daemon", "stop").code == 0, "it ends although the socket can be connected to"
    assert first.wait(WAIT) == 0
    waiting = home.popen("exec", session, "echo", "still here", stdout=subprocess.PIPE)
    second = serve(home, passed)
    assert waiting.communicate(timeout=WAIT)[0] == b"still here\n"
    assert home.ok("daemon", "status", "--json")["pid"] == second.pid
    assert home("daemon", "stop", "--force").code == 0
    assert second.wait(WAIT) == 0


def test_it_tells_when_it_is_ready_and_when_it_stops(home: Cli, passed: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(WAIT)
        manager.bind(f"{home.home}/notify")
        service = serve(home, passed, NOTIFY_SOCKET=f"{home.home}/notify")
        assert manager.recv(4096).split(b"\n")[0] == b"READY=1"
        assert home("daemon", "stop", "--force").code == 0
        assert manager.recv(4096) == b"STOPPING=1"
        assert service.wait(WAIT) == 0


def test_an_abstract_name_and_a_manager_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"atoll-notify-{os.urandom(6).hex()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    told = systemd.Manager()
    assert "NOTIFY_SOCKET" not in os.environ, "an engine would show it to its sandbox"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(WAIT)
        manager.bind(f"\0{name}")
        told.tell("READY=1")
        assert manager.recv(100) == b"READY=1"
    told.tell("STOPPING=1")
    systemd.Manager().tell("READY=1")


def test_a_socket_of_another_place_is_refused_with_words(home: Cli, passed: socket.socket) -> None:
    elsewhere = Path(home.home, "other")
    elsewhere.mkdir()
    service = serve(home, passed, ATOLL_HOME=str(elsewhere))
    _, said = service.communicate(timeout=WAIT)
    assert service.returncode == 1 and b"ListenStream=" in said, said
    assert not (elsewhere / "daemon.sock").exists()


def test_records_reach_the_journal_with_their_fields(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.settimeout(WAIT)
        journal.bind(str(tmp_path / "journal"))
        handler = systemd.JournalHandler(tmp_path, str(tmp_path / "journal"))
        log = logging.getLogger(f"atoll.test.{os.urandom(4).hex()}")
        log.addHandler(handler)
        log.propagate = False
        log.error("sandbox %s\nPRIORITY=0", "of two lines")
        data = journal.recv(65536)
        text = b"sandbox of two lines\nPRIORITY=0"
        assert data.startswith(b"MESSAGE\n" + len(text).to_bytes(8, "little") + text + b"\n"), data
        rest = data[len(b"MESSAGE\n") + 8 + len(text) + 1 :].decode().splitlines()
        fields = dict(line.split("=", 1) for line in rest)
        assert (fields["PRIORITY"], fields["SYSLOG_IDENTIFIER"], fields["ATOLL_LOGGER"]) == ("3", "atoll", log.name)
        assert fields["CODE_FILE"] == __file__ and fields["CODE_FUNC"].startswith("test_records")
    log.error("a journal that is gone is no fault")
    handler.close()


def test_the_journal_is_known_by_the_file_behind_stderr(tmp_path: Path) -> None:
    """As systemd tells it: JOURNAL_STREAM is device and inode; a shell that only inherited the variable does not match."""
    place = tmp_path / "journal"
    place.touch()
    code = "from atoll.server import systemd; print(systemd.stderr_is_journal())"
    for stream, known in (
        (f"{place.stat().st_dev}:{place.stat().st_ino}", "True\n"),
        ("1:1", "False\n"),
        ("", "False\n"),
    ):
        with place.open("wb") as file:
            done = subprocess.run(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=file, text=True,
                env={**os.environ, "PYTHONPATH": SOURCE, "JOURNAL_STREAM": stream},
            )  # fmt: skip
        assert done.stdout == known


def test_the_units_are_what_systemd_reads(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    assert program, "scripts/install-system.sh test installs it"
    for unit in UNITS.glob("atoll.*"):
        text = unit.read_text().replace("/opt/atoll/venv/bin/atoll", sys.executable)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        [program, "verify", "--man=no", "--recursive-errors=no", *map(str, tmp_path.glob("atoll.*"))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "atoll" not in done.stderr, done.stderr
