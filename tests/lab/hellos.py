"""ClientHellos made by hand, for shapes a TLS library would not send."""

import os
import struct

HRR_RANDOM = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")


def sni(*names: bytes, kind: int = 0) -> tuple[int, bytes]:
    entries = b"".join(bytes((kind,)) + struct.pack("!H", len(name)) + name for name in names)
    return 0, struct.pack("!H", len(entries)) + entries


def alpn(*protocols: bytes) -> tuple[int, bytes]:
    entries = b"".join(bytes((len(name),)) + name for name in protocols)
    return 16, struct.pack("!H", len(entries)) + entries


def body(*extensions: tuple[int, bytes], tail: bytes = b"") -> bytes:
    packed = b"".join(struct.pack("!HH", kind, len(data)) + data for kind, data in extensions)
    fields = b"\x03\x03" + os.urandom(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    if extensions:
        fields += struct.pack("!H", len(packed)) + packed
    return fields + tail


def handshake(content: bytes, kind: int = 1) -> bytes:
    return bytes((kind,)) + len(content).to_bytes(3, "big") + content


def records(message: bytes, size: int = 16384, kind: int = 22) -> bytes:
    """The message cut into TLS records of at most `size` bytes."""
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(bytes((kind, 3, 1)) + struct.pack("!H", len(part)) + part for part in parts)


def client_hello(*extensions: tuple[int, bytes], size: int = 16384) -> bytes:
    return records(handshake(body(*extensions)), size)


def hello_for(name: str) -> bytes:
    return client_hello(sni(name.encode()), alpn(b"http/1.1"))


def retry_request() -> bytes:
    """What a server sends to get a second ClientHello."""
    content = b"\x03\x03" + HRR_RANDOM + b"\x00\x13\x01\x00" + b"\x00\x00"
    return records(handshake(content, kind=2))
