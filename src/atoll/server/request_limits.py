"""How the daemon's listeners use uvicorn, and an end to a request's head: so many bytes, so much time.

uvicorn's parser has neither end, and a caller that sends a header for ever, a byte a minute, would be held for ever.
"""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atoll import errors, model
from atoll.server.request import wire

MAX_HEAD = 128 * 1024  # a path of any length the kernel takes, percent-encoded, and every header, fit many times
HEAD_SECONDS = 30.0
TOO_LARGE = errors.InvalidArgument("the request's head is too large")
TOO_SLOW = errors.InvalidArgument("the request's head did not come in time")
NO_HTTP = errors.InvalidArgument("this is not HTTP/1.1")


def settings(app: Any, protocol: type["BoundedHeads"], keep_alive: int, **more: Any) -> Config:
    """Nothing of uvicorn's own but the protocol; what a caller says of its own address is not believed."""
    made = Config(
        app,
        http=protocol,
        lifespan="off",
        interface="asgi3",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        timeout_keep_alive=keep_alive,
        server_header=False,
        date_header=False,
        **more,
    )
    made.load()
    return made


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
                self.refuse(b"431 Request Header Fields Too Large", TOO_LARGE)

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
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.refuse, b"408 Request Timeout", TOO_SLOW)

    def _head_ends(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        self.refuse(b"400 Bad Request", NO_HTTP)

    def refuse(self, status: bytes, error: errors.AtollError) -> None:
        """Answer without an app, and close."""
        self._head_ends()
        if self.transport.is_closing():
            return
        body = model.encode({"error": wire(error)})
        self.transport.write(
            b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )
        self.transport.close()
