"""RES-06: descriptors, terminals and connections by the thousand."""

import contextlib
import socket

from lab.sandboxes import HELD, PATIENCE, Lab, until

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


def test_terminals_end(lab: Lab, runtime: str) -> None:
    """More terminals than a sandbox may have: some are refused, control answers, and there is room again afterwards. The
    container's kernel counts terminals; gVisor does not, and the number of processes is what ends them there."""
    pids, asked = (128, 80) if runtime == "container" else (40, 30)
    with lab.sandbox(runtime=runtime, **({"pids": pids} if HELD else {})) as made:
        with contextlib.ExitStack() as stack:
            held = refused = 0
            for _ in range(asked):
                try:
                    stack.enter_context(made.pty(["sleep", "600"]))
                    held += 1
                except errors.AtollError:
                    refused += 1
            assert held > 5 and refused, (held, refused)
            assert len(made.processes()) > 5
            if runtime == "container":
                until(lambda: said(made), "there is room for a command")  # what was refused may still be leaving
        until(lambda: said(made), "there is room again")


def said(sandbox: Sandbox) -> str:
    with contextlib.suppress(errors.Exhausted):
        return sandbox.exec("echo on").stdout
    return ""


def test_idle_connections_do_not_lock_the_control_out(lab: Lab, anywhere: Sandbox) -> None:
    """Three hundred connections that say nothing, or half a request: list, exec and kill still answer."""
    with contextlib.ExitStack() as stack:
        for number in range(300):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.settimeout(PATIENCE)
            link.connect(f"{lab.home}/daemon.sock")
            if number % 2:
                link.sendall(b"GET /v1/sandboxes HTTP/1.1\r\nX-Slow: ")
        running = anywhere.start("sleep 659")
        assert lab.ask("GET", "/v1/sandboxes")[0] == 200
        running.kill()
        assert running.wait().exit_code == 137
