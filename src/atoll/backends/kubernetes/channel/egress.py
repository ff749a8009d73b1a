"""The way out of a pod, on the gateway's side: what the agent carries is brought to the broker, and its answers back.

The agent's frames are parsed here, as those of every agent are; the broker gets questions as packets and connections as
sockets. Nothing is decided here.
"""

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

from atoll import errors
from atoll.backends.kubernetes.channel.gateway_key import GatewayKey
from atoll.backends.kubernetes.channel.tls import EGRESS, dial
from atoll.egress import carrier
from atoll.guest import wire

_HELLO_SECONDS = 5.0
_WINDOW = 256 * 1024
_MAX_REQUEST = 8 * 1024
_MAX_FLOWS = 256
_MAX_QUESTIONS = 64
_CHUNK = 64 * 1024
_MAX_UNSENT = 32 * 1024 * 1024
_LISTEN_SECONDS = 600  # the agent listens so long for an answer; the broker's grant may end earlier
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_log = logging.getLogger(__name__)


class Carrier(Protocol):
    """The party that gives a socket to the broker."""

    async def carry(self, sandbox: str) -> socket.socket: ...


class EgressChannel:
    """Keeps the egress channel of one sandbox open until `close`. `secrets` are those of the hello: the host's, the agent's."""

    def __init__(
        self,
        egress: Carrier,
        sandbox: str,
        key: GatewayKey,
        place: tuple[str, int, str],
        secrets: tuple[str, str],
    ) -> None:
        self._egress, self._sandbox = egress, sandbox
        self._key, self._place, self._secrets = key, place, secrets
        self.connected = asyncio.Event()
        self._task = asyncio.create_task(self._keep(), name=f"egress-{sandbox}")

    async def close(self) -> None:
        """Shut the way out. Again is no error."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._serve_once()
                pause = _FIRST_PAUSE
            except (OSError, errors.AtollError, wire.WireError, asyncio.IncompleteReadError, TimeoutError) as error:
                _log.info("the egress channel of %s is away: %s", self._sandbox, error or type(error).__name__)
            except Exception:
                _log.exception("the egress channel of %s", self._sandbox)
            finally:
                self.connected.clear()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _serve_once(self) -> None:
        address, port, fingerprint = self._place
        reader, writer = await dial(self._key, address, port, fingerprint, EGRESS)
        try:
            frames = wire.FrameReader()
            early = await asyncio.wait_for(self._greet(reader, writer, frames), _HELLO_SECONDS)
            intake = await self._egress.carry(self._sandbox)
            link = _Link(writer, intake)
            self.connected.set()
            try:
                link.take(early)
                while data := await _first(reader.read(_CHUNK), link.broken):
                    link.take(frames.feed(data))
            finally:
                await link.close()
        finally:
            writer.transport.abort()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: wire.FrameReader
    ) -> list[wire.Frame]:
        """Exchange hellos; the frames that came behind the agent's."""
        ours, theirs = self._secrets
        writer.write(wire.control(wire.HELLO, 0, {"v": 1, "secret": ours}))
        while True:
            data = await reader.read(_CHUNK)
            if not data:
                raise errors.Unavailable("the agent hung up")
            if came := frames.feed(data):
                break
        hello = wire.message(came[0].payload) if came[0].kind == wire.HELLO else {}
        secret = hello.get("secret")
        if (
            hello.get("v") != 1
            or not isinstance(secret, str)
            or not hmac.compare_digest(secret.encode(), theirs.encode())
        ):
            raise errors.Internal("whoever answered is not this sandbox's agent")
        return came[1:]


async def _first(work: Any, broken: "asyncio.Future[None]") -> bytes:
    """The bytes that `work` gives; an error when the broker is gone first."""
    task = asyncio.ensure_future(work)
    await asyncio.wait((task, broken), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        raise errors.Unavailable("the egress broker hung up")
    return bytes(task.result())


class _Link:
    """One connection: its streams, and the broker's socket."""

    def __init__(self, writer: asyncio.StreamWriter, intake: socket.socket) -> None:
        self._writer = writer
        self._intake = intake
        self._questions: dict[int, None] = {}
        self._flows: dict[int, _Flow] = {}
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(intake, self._answered)

    async def close(self) -> None:
        self._loop.remove_reader(self._intake)
        self._intake.close()
        flows, self._flows = list(self._flows.values()), {}
        for flow in flows:
            flow.abort()
        await asyncio.gather(*(flow.task for flow in flows), return_exceptions=True)

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def take(self, frames: list[wire.Frame]) -> None:
        """Do what frames of the agent say; WireError when one breaks the protocol."""
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT:
            raise wire.WireError("the agent asks and does not listen")
        for frame in frames:
            flow = self._flows.get(frame.stream)
            match frame.kind:
                case wire.PING:
                    self.send(wire.pong(frame.payload))
                case wire.REQUEST:
                    self._request(frame)
                case wire.DATA if flow is not None:
                    flow.push(frame)
                case wire.EOF if flow is not None:
                    flow.finish()
                case wire.CREDIT if flow is not None and frame.channel == wire.STDIN:
                    flow.allow(wire.credit_amount(frame.payload))
                case wire.CANCEL if flow is not None:
                    flow.abort()
                case wire.PONG | wire.DATA | wire.EOF | wire.CREDIT | wire.CANCEL:
                    pass  # it crossed with the end of its stream
                case _:
                    raise wire.WireError(f"a frame of kind {frame.kind} on the egress channel")

    def _request(self, frame: wire.Frame) -> None:
        if len(frame.payload) > _MAX_REQUEST or frame.stream in self._flows or frame.stream in self._questions:
            raise wire.WireError("a request that cannot be")
        match wire.message(frame.payload):
            case {"op": "dns", "packet": bytes(packet)} if len(self._questions) < _MAX_QUESTIONS:
                self._ask(frame.stream, packet)
            case {"op": "connect", "address": str(address), "port": int(port)} if len(self._flows) < _MAX_FLOWS:
                self._connect(frame.stream, address, port)
            case {"op": "dns" | "connect"}:
                self.refuse(frame.stream, "exhausted")
            case _:
                self.refuse(frame.stream, "unsupported")

    def refuse(self, stream: int, code: str) -> None:
        self.send(wire.control(wire.RESULT, stream, {"err": {"code": code, "message": code}}))

    def _ask(self, stream: int, packet: bytes) -> None:
        try:
            self._intake.send(carrier.QUESTION.pack(b"Q", stream) + packet[: carrier.MAX_MESSAGE])
            self._questions[stream] = None
        except OSError:
            self.refuse(stream, "exhausted")

    def _answered(self) -> None:
        """Bring answers of the broker to the agent."""
        try:
            message = self._intake.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if len(message) < carrier.ANSWER.size:
            self._loop.remove_reader(self._intake)
            if not self.broken.done():
                self.broken.set_result(None)
            return
        number, count = carrier.ANSWER.unpack_from(message)
        rows = message[carrier.ANSWER.size : carrier.ANSWER.size + count * carrier.PLACE.size]
        packet = message[carrier.ANSWER.size + count * carrier.PLACE.size :]
        if number not in self._questions:
            return
        del self._questions[number]
        places = [[socket.inet_ntoa(address), port] for address, port in carrier.PLACE.iter_unpack(rows)]
        answer = {"packet": packet, "open": places, "seconds": _LISTEN_SECONDS}
        self.send(wire.control(wire.RESULT, number, {"ok": answer}))

    def _connect(self, stream: int, address: str, port: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                target = carrier.CONNECTION.pack(b"C", socket.inet_pton(socket.AF_INET, address), port)
                socket.send_fds(self._intake, [target], [theirs.fileno()])
        except (OSError, ValueError, carrier.PackError):
            ours.close()
            return self.refuse(stream, "refused")
        ours.setblocking(False)
        self._flows[stream] = _Flow(self, stream, ours, lambda: self._flows.pop(stream, None))


class _Flow:
    """One connection of a program: bytes between the agent's stream and the broker's socket."""

    def __init__(self, link: _Link, stream: int, sock: socket.socket, on_end: Callable[[], object]) -> None:
        self._link, self._stream, self._sock, self._on_end = link, stream, sock, on_end
        self._pending = bytearray()  # joined, so that many small pieces cost no more than few large ones
        self._ended = False
        self._came = asyncio.Event()
        self._credit = 0
        self._more = asyncio.Event()
        self._owed = _WINDOW  # what the agent may still send
        self._received = 0
        link.send(wire.credit(stream, wire.STDOUT, _WINDOW))
        self.task = asyncio.create_task(self._run(), name=f"egress-flow-{stream}")

    def push(self, frame: wire.Frame) -> None:
        if frame.channel != wire.STDOUT or len(frame.payload) > self._owed:
            raise wire.WireError("data without credit on the egress channel")
        self._owed -= len(frame.payload)
        self._pending += frame.payload
        self._came.set()

    def finish(self) -> None:
        """The program sends no more."""
        self._ended = True
        self._came.set()

    def allow(self, amount: int) -> None:
        self._credit += amount
        self._more.set()

    def abort(self) -> None:
        self.task.cancel()

    async def _run(self) -> None:
        up, down = asyncio.create_task(self._outwards()), asyncio.create_task(self._inwards())
        good = False
        try:
            await down
            good = self._received > 0
            if good:  # a connection that was refused ends with nothing
                await up
        except OSError as error:
            _log.debug("a carried connection ended: %s", error)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            self._sock.close()
            if self._on_end() is not None:
                if good:
                    self._link.send(wire.control(wire.RESULT, self._stream, {"ok": {}}))
                else:
                    self._link.refuse(self._stream, "reset")

    async def _outwards(self) -> None:
        """Bytes of the program to the broker, and then their end."""
        loop = asyncio.get_running_loop()
        while self._pending or not self._ended:
            if not self._pending:
                self._came.clear()
                await self._came.wait()
                continue
            piece, self._pending = self._pending, bytearray()
            try:
                await loop.sock_sendall(self._sock, piece)
            except OSError:
                pass  # the far end takes no more; what it says may still come
            self._owed += len(piece)
            self._link.send(wire.credit(self._stream, wire.STDOUT, len(piece)))
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            _log.debug("a carried connection is gone: %s", error)

    async def _inwards(self) -> None:
        """Bytes of the broker to the program, within the credit; then their end."""
        loop = asyncio.get_running_loop()
        while True:
            while self._credit <= 0:
                self._more.clear()
                await self._more.wait()
            data = await loop.sock_recv(self._sock, min(self._credit, _CHUNK))
            if not data:
                break
            self._credit -= len(data)
            self._received += len(data)
            self._link.send(wire.data_head(self._stream, wire.STDIN, len(data)) + data)
            await self._link.drain()
        if self._received:
            self._link.send(wire.eof(self._stream, wire.STDIN))
