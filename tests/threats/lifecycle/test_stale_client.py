"""LIF-07: a client of a dead sandbox never reaches its successor."""

import pytest
from lab.sandboxes import Lab

from atoll import Sandbox, errors


def test_old_references_reach_nothing(lab: Lab, runtime: str) -> None:
    """Same name, new sandbox: the old object, its id, its commands and its open stream do not lead there."""
    first = lab.create(runtime=runtime, name="stale-client")
    old, command = first.id, first.start("sleep 677")
    stream = first.stream("echo started; sleep 677", timeout=None)
    next(stream)
    first.destroy()
    with lab.sandbox(runtime=runtime, name="stale-client") as second:
        assert second.id != old
        second.files.write("/workspace/mine", b"successor")
        with pytest.raises((errors.SandboxGone, errors.NotFound)):
            first.files.read("/workspace/mine")  # the same kept-alive connection
        with pytest.raises((errors.SandboxGone, errors.NotFound)):
            first.exec("true")
        running = second.start("sleep 677")
        command.kill()  # ended with its sandbox: there is nothing to kill, here least of all
        assert running.poll().running and command.poll().status == "lost"
        with pytest.raises(errors.AtollError):
            for _ in stream:
                pass
        assert Sandbox.connect("stale-client", home=lab.home).id == second.id
        with pytest.raises((errors.SandboxGone, errors.NotFound)):
            Sandbox.connect(old, home=lab.home).exec("true")
        with pytest.raises(errors.NotFound):
            second.command(command.id)
    first.close()
