"""RES-12: a lifetime that cannot be evaded: by streams, by keeping busy, by pausing, by stopping."""

import contextlib
import threading
import time

from lab.sandboxes import PATIENCE, Lab, until

from atoll import Sandbox, errors


def busy(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(errors.AtollError):
        while time.monotonic() < deadline:
            sandbox.exec("true")


def held(sandbox: Sandbox) -> None:
    with contextlib.suppress(errors.AtollError):
        for _ in sandbox.stream("trap '' TERM; while :; do echo x; sleep 0.1; done", timeout=None):
            pass


def frozen(sandbox: Sandbox) -> None:
    with contextlib.suppress(errors.AtollError):
        sandbox.pause()


def stopped(sandbox: Sandbox) -> None:
    with contextlib.suppress(errors.AtollError):
        sandbox.stop()
        sandbox.restart()
    busy(sandbox)


def test_every_evasion_ends_at_the_deadline(lab: Lab, runtime: str) -> None:
    """All at once; each is ended with the reason `expired`."""
    boxes = [(lab.create(runtime=runtime, lifetime=4.0), evasion) for evasion in (busy, held, frozen, stopped)]
    threads = [threading.Thread(target=evasion, args=(made,)) for made, evasion in boxes]
    for thread in threads:
        thread.start()
    for made, evasion in boxes:
        info = until(lambda made=made: (i := made.info()).state == "ended" and i, f"{evasion.__name__} has ended")
        assert info.end["kind"] == "expired", (evasion, info.end)
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    for made, _ in boxes:
        made.close()
