"""TLS to a gateway: how a server is verified, the handshake, and the channel on it without any I/O.

The drivers read and write the plain socket themselves; `Channel` turns what they read into plain bytes and plain bytes into
what they write. So one thread may wait for an answer while another sends, which an `ssl.SSLSocket` does not allow.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from contextlib import suppress

from ..errors import AtollError, DaemonUnreachable, InvalidArgument
from .outcome import Refused
from .route import Route

CONNECT_SECONDS = 20.0
READ = 65_536
IDLE_SECONDS = 120.0  # a connection that was not used for longer is not trusted to be there still


class Channel:
    """One TLS connection after its handshake. Safe for one thread that reads and one that writes."""

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._lock = threading.Lock()
        self._heard = False
        self.ended = False  # the peer has said that it sends no more

    def shake_hands(self, sock: socket.socket) -> None:
        """Do the handshake on a blocking socket."""
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                sock.sendall(self._outgoing.read())
                self._feed(sock.recv(READ))
            except ssl.SSLError:
                with suppress(OSError):
                    sock.sendall(self._outgoing.read())  # why
                raise
            else:
                sock.sendall(self._outgoing.read())
                return

    @property
    def protocol(self) -> str | None:
        """Return the protocol the server chose by ALPN."""
        return self._object.selected_alpn_protocol()

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """Encrypt these bytes."""
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[self._object.write(view) :]
            return self._outgoing.read()

    def decrypt(self, data: bytes | None = None) -> bytes:
        """The plain bytes that have come, with what was just read from the socket; `b""` read is its end.

        An end that the peer has not announced is an OSError, so that nobody can cut an answer short unseen.
        """
        pieces = []
        with self._lock:
            if data is not None:
                self._feed(data)
            while not self.ended:
                try:
                    piece = self._object.read(READ)
                    self.ended = not piece  # the peer has announced the end
                    pieces.append(piece)
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLZeroReturnError:
                    self.ended = True
                except ssl.SSLError as failure:
                    if pieces:
                        break  # the next call says so
                    if not self._heard and not isinstance(failure, ssl.SSLEOFError):
                        raise Refused(reason(failure)) from None
                    raise
        self._heard = self._heard or bool(pieces)
        return b"".join(pieces)

    def _feed(self, data: bytes) -> None:
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()


class Secured:
    """A socket with its channel, as both drivers keep it."""

    def __init__(self, raw: socket.socket, channel: Channel) -> None:
        self.raw = raw
        self.channel = channel
        self.used_at = time.monotonic()

    def fileno(self) -> int:
        return self.raw.fileno()

    def shutdown(self, how: int) -> None:
        self.raw.shutdown(how)

    def close(self) -> None:
        self.raw.close()

    def touch(self) -> None:
        """It is kept for the next call from now on."""
        self.used_at = time.monotonic()

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.used_at < IDLE_SECONDS


def make_context(route: Route) -> ssl.SSLContext:
    """How this gateway is verified, and with which certificate this client shows itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # As gRPC does: a certificate that is trusted itself needs no authority above it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST
    context.set_alpn_protocols(["http/1.1"])
    try:
        if route.ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cadata=route.ca.decode("ascii"))
        if route.pair is not None:
            _load_pair(context, b"\n".join(route.pair))
    except (ssl.SSLError, ValueError) as bad:
        raise InvalidArgument(f"a certificate for {route.endpoint} is not valid: {bad}") from None
    return context


def connect(route: Route, context: ssl.SSLContext, timeout: float | None) -> Secured:
    """A verified connection that speaks HTTP/1.1, or DaemonUnreachable."""
    patience = CONNECT_SECONDS if timeout is None else min(timeout, CONNECT_SECONDS)
    raw: socket.socket | None = None
    try:
        raw = socket.create_connection((route.host, route.port), patience)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        channel = Channel(context, route.server_name)
        channel.shake_hands(raw)
        if channel.protocol != "http/1.1":
            raise _only_grpc(route)
        return Secured(raw, channel)
    except BaseException as failure:
        if raw is not None:
            raw.close()
        if isinstance(failure, OSError):
            raise unreachable(route, failure) from None
        raise


def unreachable(route: Route, failure: OSError) -> AtollError:
    """The error for a gateway to which there is no verified connection."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        hint = "give the gateway's CA: K8E_SANDBOX_CERT=ca.crt, or log in"
        return DaemonUnreachable(f"the gateway at {route.endpoint} is not trusted: {failure.verify_message}", hint=hint)
    if "NO_APPLICATION_PROTOCOL" in str(failure):
        return _only_grpc(route)
    return DaemonUnreachable(f"the gateway at {route.endpoint} cannot be reached: {reason(failure)}")


def reason(failure: OSError) -> str:
    if isinstance(failure, ssl.SSLError) and failure.reason:
        return f"TLS: {failure.reason.lower().replace('_', ' ')}"
    if isinstance(failure, TimeoutError):
        return "no answer in time"
    return failure.strerror or str(failure)


def _only_grpc(route: Route) -> AtollError:
    return DaemonUnreachable(
        f"the gateway at {route.endpoint} does not speak HTTP/1.1 on this port",
        hint="it speaks only gRPC: use SandboxClient, or a gateway of version 0.2 or newer",
    )


def _load_pair(context: ssl.SSLContext, pem: bytes) -> None:
    """Load key and certificate, which OpenSSL takes from a file alone: one that has no name."""
    descriptor = os.memfd_create("pair", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
