"""A gateway that goes and comes back: what ran runs, what was started can be asked for."""

import signal
import subprocess
import sys

import pytest

from .test_rpcs import poll, read_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_k8e_D40_runs_terminals_and_sessions_survive(gateway, number) -> None:
    local = gateway.stub()
    session = local.CreateSession(memory_mb=256).session_id
    run = local.Exec(
        session_id=session, command="while [ ! -e go ]; do sleep 0.1; done; echo went; exit 4", background=True
    )
    terminal = local.CreateTerminal(session_id=session, argv=["cat"])
    local.TerminalWrite(terminal_id=terminal.terminal_id, data=b"before\n")
    read_until(local.TerminalStream(terminal_id=terminal.terminal_id), b"before\r\nbefore\r\n")
    gateway.restart(number)
    assert local.GetSession(session_id=session).phase == "Active"
    local.WriteFile(session_id=session, path="/workspace/go", content="")
    done = poll(local, run.run_id)
    assert (done.status, done.stdout, done.exit_code) == ("completed", "went\n", 4)
    local.TerminalWrite(terminal_id=terminal.terminal_id, data=b"after\n")
    read_until(local.TerminalStream(terminal_id=terminal.terminal_id), b"after\r\nafter\r\n")
    local.DestroySession(session_id=session)


def test_a_second_gateway_on_the_same_home_refuses(gateway) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "atoll.server.daemon", "--home", str(gateway.home), "--grpc", "127.0.0.1:0"],
        capture_output=True,
        timeout=90,
    )
    assert second.returncode == 75
    assert gateway.stub().ListSessions() is not None
