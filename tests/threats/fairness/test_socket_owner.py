"""Who is at the other end of a loopback connection costs the same however many sockets the machine has."""

import os
import socket
import time
from contextlib import ExitStack

from atoll.server import socket_owner
from atoll.server.socket_owner import loopback_owner

LOOKS = 50


def _cost(client: socket.socket, listener: socket.socket) -> float:
    """CPU seconds of so many answers, the kernel's part included."""
    begun = time.thread_time()
    for _ in range(LOOKS):
        assert loopback_owner(client.getsockname(), listener.getsockname()) == os.geteuid()
    return time.thread_time() - begun


def test_many_sockets_do_not_make_it_slower() -> None:
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        client = opened.enter_context(socket.create_connection(listener.getsockname()))
        _cost(client, listener)
        alone = min(_cost(client, listener) for _ in range(3))
        for _ in range(1500):
            opened.enter_context(socket.create_connection(listener.getsockname()))
            opened.enter_context(listener.accept()[0])
        beside = min(_cost(client, listener) for _ in range(3))
    assert beside < 3 * alone + 0.01, f"{beside * 1000 / LOOKS:.2f} ms each, {alone * 1000 / LOOKS:.2f} before"
    assert beside < LOOKS * 0.001, f"{beside * 1000 / LOOKS:.2f} ms each"


def test_both_ways_of_asking_agree() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as listener:
            client = socket.create_connection(listener.getsockname()[:2])
            ends = client.getsockname()[:2], listener.getsockname()[:2]
            found = socket_owner._asked(*ends)
            assert found == socket_owner._looked_up(*ends)
            assert found == (os.geteuid(), os.fstat(client.fileno()).st_ino)
            client.close()
            assert socket_owner._asked(*ends) is None and socket_owner._looked_up(*ends) is None
            assert socket_owner._asked((host, 1), ends[1]) is None, "the listener itself is nobody's connection"
