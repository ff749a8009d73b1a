"""Plain HTTP/1 from a sandbox, read as attacker input: every request of a connection must name an allowed host.

`RequestGuard` sits in the stream from client to server. It forwards bytes unchanged, but holds each request head back
until it is complete, strictly well-formed and approved, and follows Content-Length and chunked bodies to find the next.
Whatever two parsers could read in two ways (bare LF, folded lines, both lengths, odd whitespace) is refused, so that
the server cannot see a request that the guard did not. Its work is in proportion to the bytes, in however many pieces they come.
"""

import re
from collections.abc import Callable
from typing import Final

from atoll.egress.names import BadName, from_wire
from atoll.egress.requests import OVERRIDES, Request

MAX_HEAD: Final = 65536
_MAX_FIELDS: Final = 200
_MAX_CHUNK_LINE: Final = 1024
_MAX_REMEMBERED: Final = 32
_MAX_REMEMBERED_PATH: Final = 1024
STEP: Final = 4096
_LINE = re.compile(rb"([A-Z][A-Z-]{0,31}) ([\x21-\x7e]+) HTTP/1\.([01])\Z")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e]*)?\Z")
_ABSOLUTE = re.compile(rb"(?i:http)://([^/?#]*)(?:[/?#][\x21-\x7e]*)?\Z")
_FRAMING: Final = frozenset((b"content-length", b"transfer-encoding"))
_METHOD_START = re.compile(rb"[A-Z-]{1,32}(?: |\Z)")


class HeadError(ValueError):
    """The request is refused; the text is the reason shown to people, `name` the host it asked for where known."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def parse_authority(raw: bytes, port: int) -> str:
    """The host of `Host: name[:port]`, which must be for `port`; HeadError else."""
    host, colon, digits = raw.partition(b":")
    if colon and (not digits.isdigit() or len(digits) > 5 or int(digits) != port):
        raise HeadError("Host names another port")
    try:
        return from_wire(host)
    except BadName:
        raise HeadError("malformed Host") from None


class RequestGuard:
    """Reads one direction of a connection; `approve` is called with each request's host, and `look` then with the request
    itself: they raise HeadError to refuse."""

    def __init__(
        self,
        port: int,
        approve: Callable[[str], None],
        look: Callable[[str, Request], None] = lambda host, request: None,
    ) -> None:
        self._port = port
        self._approve = approve
        self._look = look
        self._held = bytearray()
        self._at = 0  # how much of it is done with
        self._scanned = 0  # how much behind that has no end of a line or head in it
        self._state = "head"
        self._left = 0
        self.host = ""
        self.upgrade_asked = False
        self.requests: dict[tuple[str, Request], None] = {}
        self.forgot = False

    @property
    def holding(self) -> int:
        """How many bytes are held back."""
        return len(self._held)

    @property
    def appetite(self) -> int:
        """How many bytes to feed at most: the rest of a body costs nothing, heads and chunks cost by the byte."""
        return (self._left if self._state == "body" else 0) + STEP

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """The bytes that may go on now; the rest is held until more arrive."""
        self._held += data
        self._at = 0
        while self._at < len(self._held) and not self.upgrade_asked:
            step = self._body() if self._state == "body" else self._line()
            if not step:
                break
            self._at += step
        ready = bytes(self._held[: self._at])
        del self._held[: self._at]
        return ready

    def answered(self, upgraded: bool) -> bytes:
        """After a WebSocket request, the server answered: with 101 all bytes pass, else requests go on being read."""
        self.upgrade_asked = False
        if upgraded:
            self._state, self._left = "body", 1 << 62
        return self.feed(b"")

    def _body(self) -> int:
        step = min(self._left, len(self._held) - self._at)
        self._left -= step
        if self._left == 0:
            self._state = self._after
        return step

    _after = "head"

    def _line(self) -> int:
        """Consume one head, or one line of a chunked body; 0 asks for more."""
        if self._state == "head":
            end = self._find(b"\r\n\r\n")
            if end < 0:
                if len(self._held) - self._at > MAX_HEAD:
                    raise HeadError("request head too large")
                self._check_start()
                return 0
            if end > MAX_HEAD:
                raise HeadError("request head too large")
            self._head(bytes(self._held[self._at : self._at + end]))
            return end + 4
        end = self._find(b"\r\n")
        if end < 0 or end > _MAX_CHUNK_LINE:
            if len(self._held) - self._at > _MAX_CHUNK_LINE:
                raise HeadError("malformed chunk")
            return 0
        self._chunk_line(bytes(self._held[self._at : self._at + end]))
        return end + 2

    def _find(self, mark: bytes) -> int:
        """Where `mark` is, counted from here, or -1. What was searched before is not searched again."""
        found = self._held.find(mark, self._at + max(0, self._scanned - len(mark) + 1))
        if found < 0:
            self._scanned = len(self._held) - self._at
            return -1
        self._scanned = 0
        return found - self._at

    def _check_start(self) -> None:
        """Fail early on what cannot become a request, such as TLS or SSH on the HTTP port."""
        if _METHOD_START.match(self._held[self._at : self._at + 33]) is None:
            raise HeadError("not HTTP")

    def _chunk_line(self, line: bytes) -> None:
        if self._state == "chunk-end":
            if line:
                raise HeadError("malformed chunk")
            self._state = "chunk"
        elif self._state == "trailer":
            if not line:
                self._state = "head"
            elif _FIELD.match(line) is None:
                raise HeadError("malformed trailer")
        else:
            match = _CHUNK.match(line)
            if match is None:
                raise HeadError("malformed chunk")
            self._left = int(match[1], 16)
            self._state, self._after = ("body", "chunk-end") if self._left else ("trailer", "head")

    def _head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        if len(lines) > _MAX_FIELDS:
            raise HeadError("too many header fields")
        match = _LINE.match(first)
        if match is None:
            raise HeadError("not HTTP")
        method, target, minor = match[1], match[2], match[3]
        if method in (b"CONNECT", b"PRI"):
            raise HeadError("HTTP/2 without TLS" if method == b"PRI" else "CONNECT is not served")
        fields: dict[bytes, list[bytes]] = {}
        for line in lines:
            field = _FIELD.match(line)
            if field is None:
                raise HeadError("malformed header field")
            fields.setdefault(field[1].lower(), []).append(field[2])
        # To many programs behind a server `_` and `-` in a name are the same.
        alike = {name.replace(b"_", b"-") for name in fields}
        if not _FRAMING.isdisjoint(alike - fields.keys()):
            raise HeadError("a header field that can be taken for another")
        hosts = fields.get(b"host", [])
        if len(hosts) != 1:
            raise HeadError("a request needs exactly one Host")
        host = parse_authority(hosts[0], self._port)
        path = self._check_target(method, target, host)
        self._frame(fields, minor, host)
        self._approve(host)
        body, overrides = self._state != "head", not OVERRIDES.isdisjoint(alike)
        request = Request(method.decode(), path, bool(self.upgrade_asked), body, overrides)
        self._look(host, request)
        self._remember(host, request)
        self.host = host

    def _remember(self, host: str, request: Request) -> None:
        """Keep what was let through: a narrower list may end it while it runs."""
        full = len(self.requests) >= _MAX_REMEMBERED or len(request.path) > _MAX_REMEMBERED_PATH
        self.forgot = self.forgot or (full and (host, request) not in self.requests)
        if not self.forgot:
            self.requests[host, request] = None

    def _check_target(self, method: bytes, target: bytes, host: str) -> str:
        """The path that is asked for, without its query."""
        if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
            return target.partition(b"?")[0].decode()
        match = _ABSOLUTE.match(target)
        if match is None:
            raise HeadError("malformed request target", host)
        if parse_authority(match[1], self._port) != host:
            raise HeadError("request target and Host disagree", host)
        return (target[match.end(1) :] or b"/").partition(b"?")[0].decode()

    def _frame(self, fields: dict[bytes, list[bytes]], minor: bytes, host: str) -> None:
        lengths, codings = fields.get(b"content-length", []), fields.get(b"transfer-encoding", [])
        if len(lengths) + len(codings) > 1:
            raise HeadError("ambiguous body length", host)
        if codings:
            if minor == b"0" or codings[0].lower() != b"chunked":
                raise HeadError("unknown transfer coding", host)
            self._state = "chunk"
        elif lengths:
            if not lengths[0].isdigit() or len(lengths[0]) > 18:
                raise HeadError("malformed Content-Length", host)
            self._left = int(lengths[0])
            self._state, self._after = ("body", "head") if self._left else ("head", "head")
        upgrades = fields.get(b"upgrade", [])
        if not upgrades:
            return
        if [value.lower() for value in upgrades] != [b"websocket"] or codings or self._state == "body":
            raise HeadError("protocol upgrade other than WebSocket", host)
        # Only on a fresh connection are the server's next bytes surely its answer to this request.
        if self.host:
            raise HeadError("protocol upgrade on a used connection", host)
        self.upgrade_asked = True
