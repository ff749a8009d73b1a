"""RES-06: descriptors, terminals and connections by the thousand."""

import contextlib
import socket

from sandbox_lab import PATIENCE, Lab, until

from atoll import Sandbox, errors

OPEN = """
import os
n = 0
try:
    while n < 10000: os.open('/dev/null', os.O_RDONLY); n += 1
except OSError as error: print(error.errno, n < 128)
"""
RAISE = """
import resource
try: resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))
except (OSError, ValueError): print('no')
"""


def test_open_files_end_with_a_clean_error(lab: Lab, runtime: str) -> None:
    """EMFILE at the limit, hard; the agent and other commands go on."""
    with lab.sandbox(runtime=runtime, files=128) as made:
        assert made.run(OPEN).stdout == "24 True\n"
        assert made.run(RAISE).stdout == "no\n"
        assert made.exec("echo on").stdout == "on\n"


def test_terminals_and_watchers_end(sandbox: Sandbox) -> None:
    """More terminals and watchers than a sandbox may have: some are refused, everything else answers."""
    held = []
    refused = 0
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            try:
                held.append(stack.enter_context(sandbox.pty(["sleep", "600"])))
            except errors.AtollError:
                refused += 1
        assert (
            until(lambda: said(sandbox), "there is room for a command") == "on\n"
        )  # what was refused may still be leaving
        assert held and len(sandbox.processes()) > 10
    assert len(held) + refused == 80


def said(sandbox: Sandbox) -> str:
    with contextlib.suppress(errors.Exhausted):
        return sandbox.exec("echo on").stdout
    return ""


def test_idle_connections_do_not_lock_the_control_out(lab: Lab, sandbox: Sandbox) -> None:
    """Three hundred connections that say nothing, or half a request: list, exec and kill still answer."""
    with contextlib.ExitStack() as stack:
        for number in range(300):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.settimeout(PATIENCE)
            link.connect(f"{lab.home}/daemon.sock")
            if number % 2:
                link.sendall(b"GET /v1/sandboxes HTTP/1.1\r\nX-Slow: ")
        running = sandbox.start("sleep 659")
        assert lab.ask("GET", "/v1/sandboxes")[0] == 200
        running.kill()
        assert running.wait().exit_code == 137
