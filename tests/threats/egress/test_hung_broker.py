"""EGR-11: a broker that hangs passes nothing, is found out, and is replaced; sandboxes go on with their lists."""

import os
import signal

import pytest
from lab.internet import Inside, World, wait_for

from atoll.egress import EgressPolicy, Kept
from atoll.egress.control import broker_process
from atoll.egress.control import line as broker_line

ADDRESS = "203.0.113.10"


def speaks(box: Inside) -> None:
    with box.tls("a.example") as tls:
        tls.sendall(b"x")
        assert tls.recv(10) == b"tls:x"


def test_a_broker_that_hangs_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the broker for good: nothing passes, another takes its place, and sandboxes go on with their lists."""
    world.inet.records["a.example"] = [ADDRESS]
    monkeypatch.setattr(broker_line, "PULSE_SECONDS", 0.2)
    monkeypatch.setattr(broker_line, "SILENT_SECONDS", 5.0)
    # The pulse already under way has the usual rhythm; from the next broker on it beats as set here.
    first = world.egress.broker_pid
    os.kill(first, signal.SIGKILL)
    wait_for("a broker with a fast pulse", lambda: world.egress.broker_pid not in (0, first))
    with world.sandbox("a.example") as box, world.sandbox() as none:
        speaks(box)
        hung, before = world.egress.broker_pid, len(world.inet.dialled)
        os.kill(hung, signal.SIGSTOP)
        with box.open() as sock:
            sock.settimeout(0.5)
            with pytest.raises(OSError):
                sock.connect((ADDRESS, 443))
                sock.sendall(b"x")
                sock.recv(1)
        assert len(world.inet.dialled) == before, "nothing passes meanwhile"
        wait_for("another broker", lambda: world.egress.broker_pid not in (0, hung))
        wait_for("the end of the one that hung", lambda: not os.path.exists(f"/proc/{hung}"))
        speaks(box)
        assert none.ask("a.example") == (3, [])
        with none.open() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect((ADDRESS, 443))


def test_a_daemon_that_finds_a_hung_broker_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start over when the broker a daemon left behind does not answer: it is ended, its sandboxes are connected anew."""
    world = World()
    try:
        world.inet.records["a.example"] = [ADDRESS]
        with world.sandbox("a.example") as box:
            hung = world.egress.broker_pid
            world.call(world.egress.close(keep_broker=True))
            os.kill(hung, signal.SIGSTOP)
            connect, patience = broker_process.connect, iter([1.0])
            monkeypatch.setattr(
                broker_process, "connect", lambda directory, *_: connect(directory, next(patience, 60.0))
            )
            world.egress = world.start_egress()
            assert not world.egress.adopted and world.egress.broker_pid != hung
            wait_for("its end", lambda: _state(hung) in ("", "Z"))
            links = world.call(
                world.egress.readopt([Kept(box.name, box.link, EgressPolicy.of(["a.example"]), box.net)])
            )
            assert links[box.name].address == box.link.address
            speaks(box)
    finally:
        world.close()


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
