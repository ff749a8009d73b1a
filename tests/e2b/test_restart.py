"""A daemon that is killed: sandboxes, their tokens and their processes are there again with the next one."""

import os
import signal

import pytest
from e2b import PtySize, Sandbox
from lab.e2b import new_key, opened
from lab.sandboxes import Lab
from lab.waiting import until


def test_tokens_and_processes_outlive_the_daemon(own_lab: Lab) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: the SDK's usual user is another than root")
    if why := own_lab.works("container"):
        pytest.skip(f"container: {why}")
    with opened(own_lab, "container") as port:
        options = {"api_key": new_key(own_lab), "api_url": f"http://127.0.0.1:{port}", "domain": "x"}
        box = Sandbox.create(timeout=600, sandbox_url=f"http://127.0.0.1:{port}", **options)
        kept = box.commands.run("read x; echo got $x > /tmp/got", background=True, stdin=True, timeout=0)
        terminal = box.pty.create(PtySize(rows=24, cols=80), timeout=0)
        token = box._envd_access_token
        os.kill(own_lab.start(), signal.SIGKILL)
    with opened(own_lab, "container") as port:
        url = f"http://127.0.0.1:{port}"
        again = Sandbox.connect(box.sandbox_id, **{**options, "api_url": url, "sandbox_url": url})
        assert again._envd_access_token == token
        assert {one.pid for one in again.commands.list()} == {kept.pid, terminal.pid}
        heard: list[bytes] = []
        screen = again.pty.connect(terminal.pid)
        again.pty.send_stdin(terminal.pid, b"echo $((6*7))answer; exit\n")
        screen.wait(on_pty=heard.append)
        assert b"42answer" in b"".join(heard), "a terminal is still one"
        again.commands.send_stdin(kept.pid, "it\n")
        until(lambda: again.files.exists("/tmp/got"), "its input arrived")
        until(lambda: again.commands.list() == [], "it has ended")
        assert again.commands.connect(kept.pid).wait().exit_code == 0
        assert again.kill() is True
