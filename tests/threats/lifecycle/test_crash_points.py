"""LIF-04: the daemon is killed at any moment under load. tests/backend/test_gone.py kills it at every step of a create."""

import contextlib
import os
import random
import signal
import threading

from lab.sandboxes import LONG, PATIENCE, Lab, alive, left, until

from atoll import Sandbox, errors


def test_random_kills_leak_nothing_and_lose_nothing(own_lab: Lab) -> None:
    """After each kill the known sandboxes answer with their files; at the end the machine is as before."""
    chance = random.Random(7)
    own_lab.start()
    kept = [own_lab.create(runtime="container", name=f"kept{n}") for n in range(2)]
    for number, made in enumerate(kept):
        made.files.write("/workspace/mark", str(number))
    background = kept[0].start("for i in $(seq 1000000); do echo $i; sleep 0.05; done")
    for _ in range(40 if LONG else 3):
        stop = threading.Event()

        def load(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                with contextlib.suppress(errors.AtollError, OSError):
                    made = own_lab.create(runtime="container")
                    made.exec("echo x")
                    made.stop()
                    made.restart()
                    made.destroy()
                    made.close()

        workers = [threading.Thread(target=load) for _ in range(2)]
        for worker in workers:
            worker.start()
        pid = own_lab.start()
        stop.wait(chance.uniform(0.02, 0.8))
        os.kill(pid, signal.SIGKILL)
        stop.set()
        for worker in workers:
            worker.join(2 * PATIENCE)
        until(lambda pid=pid: not alive(pid), "the killed daemon is gone")
        own_lab.start()
        for number, made in enumerate(kept):
            assert made.files.read("/workspace/mark") == str(number).encode()
        assert background.poll().running
    for info in Sandbox.list(home=own_lab.home, state="all"):
        if info.state != "ended":
            Sandbox.connect(info.id, home=own_lab.home).destroy()
    until(lambda: not any(left(own_lab.mark, own_lab.home).values()), "nothing is left")
