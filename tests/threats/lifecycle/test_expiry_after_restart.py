"""LIF-05: a deadline that passes while no daemon runs is executed before the first answer of the next one."""

import os
import signal
import time

from lab.sandboxes import Lab, alive, until

from atoll import Sandbox


def test_it_is_gone_before_the_first_answer(own_lab: Lab, runtime: str) -> None:
    """Killed before, started after the deadline: the first thing said is that it has expired."""
    made = own_lab.create(runtime=runtime, lifetime=4.0)
    deadline = made.info().expires_at
    assert deadline is not None
    init = made.info().wire["pid"]
    ident = made.id
    made.close()
    os.kill(own_lab.start(), signal.SIGKILL)
    until(lambda: time.time() > deadline, "the deadline has passed")
    first = Sandbox.list(home=own_lab.home, state="all")  # starts the next daemon; this is its first answer
    assert [(info.id, info.state) for info in first] == [(ident, "ended")]
    assert first[0].end is not None and first[0].end["kind"] == "expired"
    until(lambda: not alive(init), "its processes are gone")
