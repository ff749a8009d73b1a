"""`run --publish`: ports of a run's sandbox on this machine's loopback, for as long as the run lasts.

This process listens and carries the bytes itself, through the daemon's tunnel; nothing of it stays when the run is over.
"""

from __future__ import annotations

import socket
import threading

from atoll.cli.execute import beside
from atoll.cli.output import say
from atoll.client._sync.driver import Link
from atoll.client._sync.tunnel import Tunnel, open_tunnel
from atoll.errors import AtollError, InvalidArgument, Unavailable, Unsupported

PIECE = 65_536
ADDRESS = "127.0.0.1"


def read(text: str) -> tuple[int, int]:
    """`8080:80`, or `80` for the same on both sides: the port here and the one inside."""
    ports, _, protocol = text.partition("/")
    if protocol not in ("", "tcp"):
        raise Unsupported(f"port {text!r:.60}: only TCP can be published")
    here, _, inside = ports.rpartition(":")
    numbers = [int(word) for word in (here or inside, inside) if word.isascii() and word.isdigit()]
    if len(numbers) != 2 or not 0 <= numbers[0] < 65536 or not 0 < numbers[1] < 65536:
        raise InvalidArgument(f"{text!r:.60} is not a port to publish", hint="such as 8080:80, or 8080")
    return numbers[0], numbers[1]


class Published:
    """Listeners, bound at once so that a port in use is told before anything is started."""

    def __init__(self, link: Link, ports: list[str]) -> None:
        self._link = link
        self._listeners: list[tuple[socket.socket, int]] = []
        for here, inside in [read(text) for text in ports]:
            try:
                listener = socket.create_server((ADDRESS, here))
            except OSError as failure:
                raise Unavailable(f"port {here} of this machine cannot be published: {failure.strerror}") from None
            self._listeners.append((listener, inside))

    def open(self, sandbox: str) -> None:
        """The sandbox is there: let callers in."""
        for listener, inside in self._listeners:
            say(f"port {inside} is published at {ADDRESS}:{listener.getsockname()[1]}")
            threading.Thread(target=self._accept, args=(listener, sandbox, inside), daemon=True).start()

    def _accept(self, listener: socket.socket, sandbox: str, inside: int) -> None:
        while True:
            caller, _ = listener.accept()
            threading.Thread(target=self._carry, args=(caller, sandbox, inside), daemon=True).start()

    def _carry(self, caller: socket.socket, sandbox: str, inside: int) -> None:
        with caller:
            try:
                with open_tunnel(beside(self._link), sandbox, inside) as tunnel:
                    threading.Thread(target=_inwards, args=(caller, tunnel), daemon=True).start()
                    while data := tunnel.recv():
                        caller.sendall(data)
                    caller.shutdown(socket.SHUT_WR)
            except (AtollError, OSError):
                pass  # nobody listens inside, or one of the two has gone: the caller sees a closed connection


def _inwards(caller: socket.socket, tunnel: Tunnel) -> None:
    try:
        while data := caller.recv(PIECE):
            tunnel.send(data)
        tunnel.send_eof()
    except (AtollError, OSError):
        pass  # the other direction tells
