"""An end to a request's head: so many bytes, so much time. The parser below has neither, and a caller that sends a header
without end, a byte a minute, would be held for ever."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atoll import errors, model

MAX_HEAD = 128 * 1024  # a path of any length the kernel takes, percent-encoded, and every header, fit many times
HEAD_SECONDS = 30.0


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol; from connecting, or from a request's first byte, to the end of its head the clock runs."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True  # also before its first byte, on a fresh connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_begins()

    def data_received(self, data: bytes) -> None:
        reading = self._in_head
        super().data_received(data)
        if not self._in_head:
            return
        self._head_begins()  # most heads are whole by now and need no clock
        if reading:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse(b"431 Request Header Fields Too Large", "the request's head is too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._head_ends()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ends()
        super().connection_lost(exc)

    def _head_begins(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(
                HEAD_SECONDS, self._refuse, b"408 Request Timeout", "the request's head did not come in time"
            )

    def _head_ends(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes, why: str) -> None:
        self._head_ends()
        if self.transport.is_closing():
            return
        body = model.encode({"error": errors.InvalidArgument(why).to_wire()})
        self.transport.write(
            b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )
        self.transport.close()
