"""Sandboxes without a link: their questions and connections are carried to the broker by whoever holds the other end of a socket.

The socket keeps messages apart. One that begins with `Q` is a question for a name: a number, then the packet. It is answered
by the number, the places that are open for the answer (address and port of each), and the packet. One that begins with `C` is a
connection: the address and port the program connected to, and with it a stream socket, which is the program's from then on.
Names and connections are judged like those of every other sandbox; only where they come from differs.
"""

import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, Final

from atoll.egress.broker.flow import Ask, Flow
from atoll.egress.broker.registry import Roster
from atoll.egress.broker.resolver import Report, Resolver
from atoll.egress.broker.sandbox import Member

QUESTION: Final = struct.Struct("!cI")
ANSWER: Final = struct.Struct("!IH")
CONNECTION: Final = struct.Struct("!c4sH")
PLACE: Final = struct.Struct("!4sH")
MAX_MESSAGE: Final = QUESTION.size + 4096
ANY_PORTS: Final = (22, 80, 443, 8080, 8443)  # where a name is open on every port: these are listened on
MAX_PORTS: Final = 8
PackError = struct.error
_AT_ONCE: Final = 4
_log = logging.getLogger(__name__)


class Carrier:
    """One such socket, served in the lane of its sandbox until `end`."""

    def __init__(
        self, member: Member, sock: socket.socket, roster: Roster, resolver: Resolver, report: Report, ask: Ask
    ) -> None:
        self._member, self._sock = member, sock
        self._roster, self._resolver = roster, resolver
        self._report, self._ask = report, ask
        self._flows: set[Flow] = set()
        sock.setblocking(False)
        member.lane.add_reader(sock, self._readable)

    def end(self) -> None:
        """Close it, and cut the connections that came over it. Again is no error."""
        if self._sock.fileno() < 0:
            return
        self._member.lane.forget(self._sock)
        self._sock.close()
        for flow in self._flows & self._member.flows:
            flow.cut()
        self._flows.clear()

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                message, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                message, fds = b"", []
            if not message:
                self.end()
                return
            if message[:1] == b"C" and len(message) == CONNECTION.size and len(fds) == 1:
                self._take_connection(message, socket.socket(fileno=fds[0]))
                continue
            for fd in fds:
                os.close(fd)
            if message[:1] == b"Q" and len(message) > QUESTION.size:
                self._take_question(message)

    def _take_question(self, message: bytes) -> None:
        _, number = QUESTION.unpack_from(message)
        answer = self._resolver.answer(self._member, message[QUESTION.size :])
        if isinstance(answer, Coroutine):
            self._member.lane.spawn(self._answer_later(number, answer))
        else:
            self._answer(number, answer or b"")

    async def _answer_later(self, number: int, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            self._answer(number, await work)
        except Exception:
            _log.exception("carried question")

    def _answer(self, number: int, packet: bytes) -> None:
        places = list(self._places(packet))
        rows = b"".join(PLACE.pack(socket.inet_aton(address), port) for address, port in places)
        try:
            self._sock.send(ANSWER.pack(number, len(places)) + rows + packet)
        except OSError as err:  # its queue is full, or it is gone: the program asks again
            _log.debug("carried answer: %s", err)

    def _places(self, packet: bytes) -> "list[tuple[str, int]]":
        """Where a program may connect to after this answer of our own resolver."""
        if len(packet) < 12:
            return []
        (count,) = struct.unpack_from("!H", packet, 6)
        addresses = [socket.inet_ntoa(packet[end - 4 : end]) for end in range(len(packet), 0, -16)[:count]]
        places: dict[tuple[str, int], None] = {}
        for address in addresses:
            for name in self._member.grants.names(address):
                ports = self._member.policy.ports(name)
                for port in ANY_PORTS if ports is None else ports[:MAX_PORTS]:
                    places[address, port] = None
        return list(places)

    def _take_connection(self, message: bytes, client: socket.socket) -> None:
        _, packed, port = CONNECTION.unpack(message)
        target = (socket.inet_ntoa(packed), port)
        client.setblocking(False)
        if not self._roster.take_room(self._member):
            self._report(self._member, "", *target, "tcp", "too many connections at once")
            client.close()
            return
        flow = Flow(self._member, client, target, self._report, self._ask)
        self._flows = {one for one in self._flows if one in self._member.flows} | {flow}
        flow.start()


class CarrierPlace:
    """Stands where other sandboxes have the sockets of their link."""

    def __init__(self) -> None:
        self._carrier: Carrier | None = None

    def put(self, make: Callable[[], Carrier]) -> None:
        """Replace the carrier: what the old one carried ends."""
        self.close()
        self._carrier = make()

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.end()
            self._carrier = None
