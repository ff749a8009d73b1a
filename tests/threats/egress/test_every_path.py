"""EGR-11: no path leaves a sandbox without its policy: before the first apply, when the broker or the daemon dies."""

import contextlib
import os
import signal
import socket
import ssl

import pytest
from lab.internet import Inside, World, dns_query, new_net, wait_for

from atoll.egress import EgressPolicy, Kept

ADDRESS = "203.0.113.10"


def speaks(box: Inside, name: str) -> None:
    with box.tls(name) as tls:
        tls.sendall(b"x")
        assert tls.recv(10) == b"tls:x"


def test_link_without_a_policy_is_down(world: World) -> None:
    """Pass nothing before the first policy, not even DNS; pass what is allowed right after it."""
    world.inet.records["a.example"] = [ADDRESS]
    name, net = f"early-{os.getpid()}", new_net()
    try:
        link = world.call(world.egress.attach(name, net, None))
        box = Inside(world, name, net, link)
        with box.open(socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.3)
            with contextlib.suppress(OSError):
                sock.sendto(b"\0" * 20, (link.gateway, 53))
            with pytest.raises(OSError):
                sock.recv(100)
        with box.open() as sock, pytest.raises(OSError):
            sock.settimeout(0.3)
            sock.connect((ADDRESS, 443))
        box.update("a.example")
        speaks(box, "a.example")
    finally:
        world.call(world.egress.detach(name))
        os.close(net)


def test_empty_policy_reaches_nothing(world: World) -> None:
    """Read an empty list as no host at all."""
    world.inet.records["a.example"] = [ADDRESS]
    with world.sandbox() as box:
        assert box.ask("a.example") == (3, [])
        with box.open() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect((ADDRESS, 443))


def test_killed_broker_leaks_nothing_and_comes_back(world: World) -> None:
    """Kill the broker in traffic: connections end, nothing passes without it, then the policy is in force again."""
    world.inet.records["a.example"] = [ADDRESS]
    with world.sandbox("a.example") as box, world.sandbox() as none:
        tls = box.tls("a.example")
        tls.sendall(b"x")
        assert tls.recv(10) == b"tls:x"
        pid, before = world.egress.broker_pid, len(world.inet.dialled)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ssl.SSLError):
            assert tls.recv(10) == b""
        tls.close()
        # Either reset at once, or accepted by the kernel and then reset: never passed on.
        with contextlib.suppress(OSError), box.open() as sock:
            sock.connect((ADDRESS, 443))
            sock.sendall(b"x" * 100)
            assert sock.recv(10) == b""
        assert len(world.inet.dialled) == before
        wait_for("a new broker", lambda: world.egress.broker_pid not in (0, pid))
        speaks(box, "a.example")
        assert none.ask("a.example") == (3, [])
        with none.open() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect((ADDRESS, 443))


def test_stopped_broker_passes_nothing(world: World) -> None:
    """Freeze the broker: connections hang or fail, nothing is dialled; thawed, it goes on."""
    world.inet.records["a.example"] = [ADDRESS]
    with world.sandbox("a.example") as box:
        box.resolve("a.example")
        before = len(world.inet.dialled)
        os.kill(world.egress.broker_pid, signal.SIGSTOP)
        try:
            with box.open() as sock, pytest.raises(OSError):
                sock.settimeout(0.5)
                sock.connect((ADDRESS, 443))
                sock.sendall(b"x")
                sock.recv(1)
            assert len(world.inet.dialled) == before
        finally:
            os.kill(world.egress.broker_pid, signal.SIGCONT)
        speaks(box, "a.example")


def test_closing_a_host_cuts_its_connections(world: World) -> None:
    """Change the policy in traffic: the closed host's connections end, others live on, and it cannot be reached again."""
    world.inet.records["a.example"] = [ADDRESS]
    world.inet.records["b.example"] = ["203.0.113.20"]
    with world.sandbox("a.example", "b.example:5432", "b.example") as box:
        a = box.tls("a.example")
        b, plain = box.tls("b.example"), box.connect("b.example", 5432)
        plain.sendall(b"echo")
        assert plain.recv(10) == b"echo"
        box.update("a.example")
        for sock in (b, plain):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert sock.recv(10) == b""
            sock.close()
        a.sendall(b"x")
        assert a.recv(10) == b"tls:x"
        a.close()
        with box.open() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect(("203.0.113.20", 443))
        assert box.ask("b.example") == (3, [])
        box.update("a.example", "b.example")
        speaks(box, "b.example")


def test_policy_that_changes_during_resolution_wins(world: World) -> None:
    """Do not grant a name that was closed while upstream was being asked."""
    world.inet.records["slow.example"] = ["203.0.113.30"]
    with world.sandbox("slow.example") as box:
        world.inet.held.clear()
        world.inet.hold_answers.clear()
        try:
            with box.open(socket.SOCK_DGRAM) as sock:
                sock.sendto(dns_query(b"slow.example"), (box.link.gateway, 53))
                wait_for("the question", lambda: len(world.inet.held) > 0)
                box.update()
                world.inet.hold_answers.set()
                assert sock.recv(512)[3] & 15 == 3
        finally:
            world.inet.hold_answers.set()
        with box.open() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect(("203.0.113.30", 443))


def test_two_sandboxes_keep_their_own_lists(world: World) -> None:
    """Give two sandboxes different lists; a change of one is none of the other."""
    world.inet.records["a.example"] = [ADDRESS]
    world.inet.records["b.example"] = ["203.0.113.20"]
    with world.sandbox("a.example") as one, world.sandbox("b.example") as two:
        speaks(one, "a.example")
        speaks(two, "b.example")
        assert one.ask("b.example") == two.ask("a.example") == (3, [])
        one.update()
        speaks(two, "b.example")
        assert one.ask("a.example") == (3, [])


def test_detached_sandbox_is_cut_off(world: World) -> None:
    """End open connections with the link; detaching twice is no error."""
    world.inet.records["a.example"] = [ADDRESS]
    with world.sandbox("a.example") as box:
        with box.connect("a.example", 443) as sock:
            counters = world.call(world.egress.detach(box.name))
            assert counters["open"] == 0 or counters["hosts"] is not None
            sock.settimeout(0.5)
            with contextlib.suppress(OSError):
                assert sock.recv(10) == b""
        assert world.call(world.egress.detach(box.name)) == {}
        with box.open(socket.SOCK_DGRAM) as sock, pytest.raises(OSError):
            sock.settimeout(0.3)
            sock.sendto(b"\0" * 20, (box.link.gateway, 53))
            sock.recv(100)


@pytest.mark.parametrize("broker_dies_too", [False, True])
def test_new_daemon_takes_over(broker_dies_too: bool) -> None:
    """Lose the daemon: connections live on through the broker and the next daemon rules again, or all is made anew."""
    world = World()
    try:
        world.inet.records["a.example"] = [ADDRESS]
        world.inet.records["b.example"] = ["203.0.113.20"]
        with world.sandbox("a.example", "b.example") as box, world.sandbox("a.example") as gone:
            tls = box.tls("a.example")
            pid = world.egress.broker_pid
            world.call(world.egress.close(keep_broker=True))
            tls.sendall(b"x")
            assert tls.recv(10) == b"tls:x"
            # Nobody can open a new way without the daemon.
            assert gone.ask("a.example")[0] == 2
            if broker_dies_too:
                os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(OSError, ssl.SSLError):
                    assert tls.recv(10) == b""
            world.egress = world.start_egress()
            assert world.egress.adopted is not broker_dies_too
            kept = Kept(box.name, box.link, EgressPolicy.of(["b.example"]), box.net)
            links = world.call(world.egress.readopt([kept]))
            assert links[box.name].address == box.link.address and links[box.name].gateway == box.link.gateway
            # The new daemon's policy has closed a.example.
            with contextlib.suppress(OSError, ssl.SSLError):
                assert tls.recv(10) == b""
            tls.close()
            speaks(box, "b.example")
            assert box.ask("a.example") == (3, [])
            with gone.open(socket.SOCK_DGRAM) as sock, pytest.raises(OSError):
                sock.settimeout(0.5)
                sock.sendto(b"\0" * 20, (gone.link.gateway, 53))
                sock.recv(100)
    finally:
        world.close()
