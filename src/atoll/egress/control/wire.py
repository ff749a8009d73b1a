"""The control channel between daemon and broker: length-prefixed JSON messages over a Unix stream socket.

Requests from the daemon carry `n` and are answered with the same `n`; the broker sends events and grant requests of its
own accord. Both ends bound what they accept.
"""

import asyncio
import json
import struct
from typing import Any, Final

VERSION: Final = 5
MAX_MESSAGE: Final = 4 * 1024 * 1024
# Sent when a daemon connects: version of this protocol, process id of the broker. With it come descriptors: the router's namespace
# first, its log last, and between them a socket over which the daemon hands over the sockets of new links.
GREETING: Final = struct.Struct("!BI")
_LENGTH = struct.Struct("!I")

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> Message:
    """The next message; IncompleteReadError at the end of the stream, ValueError for anything malformed."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MAX_MESSAGE:
        raise ValueError("control message too large")
    message = json.loads(await reader.readexactly(size))
    if not isinstance(message, dict):
        raise ValueError("control message is not an object")
    return message
