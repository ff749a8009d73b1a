"""Orders to the agent of a pod: activate it, let it dial canaries, ask how it is."""

import asyncio
import json
import ssl
import struct
from typing import Any

from atoll.backends.kubernetes.channel.gateway_key import GatewayKey
from atoll.backends.kubernetes.channel.tls import ACTIVATE, dial
from atoll.errors import FailedPrecondition, Internal, PermissionDenied, Unavailable

_VERSION = 1
_MAX_ANSWER = 64 * 1024
_LENGTH = struct.Struct("!I")
_NOT_OURS = frozenset(("CERTIFICATE_UNKNOWN", "UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_REQUIRED"))


class Refused(FailedPrecondition):
    """The agent did not carry out an order. `reason` is its code: `egress_open`, `other_claim`, `bad_request`, ..."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, details={"reason": reason})
        self.reason = reason


async def order(key: GatewayKey, address: str, port: int, fingerprint: str, value: dict[str, Any]) -> dict[str, Any]:
    """Send one order and return what the agent answers under `ok`. Its `err` is raised as Refused.

    Without an answer the order may have been carried out: Unavailable. An activation may then be sent again as it was.
    """
    reader, writer = await dial(key, address, port, fingerprint, ACTIVATE)
    try:
        body = json.dumps({"v": _VERSION, **value}, separators=(",", ":")).encode()
        writer.write(_LENGTH.pack(len(body)) + body)
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > _MAX_ANSWER:
            raise Internal("the pod's agent answers with more than is allowed")
        answer = await reader.readexactly(size)
    except ssl.SSLError as error:
        if any(f"ALERT_{word}" in (error.reason or "") for word in _NOT_OURS):
            raise PermissionDenied(
                "the pod's agent does not take orders from this gateway",
                hint=f"the template's --gateway-key must be {key.public}",
            ) from None
        raise Unavailable(f"the pod's agent hung up: {error.reason}") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Unavailable(f"the pod's agent hung up: {error or type(error).__name__}") from None
    finally:
        writer.transport.abort()
    return _read_answer(answer)


def _read_answer(raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        answer = None
    match answer:
        case {"v": 1, "ok": dict(ok)}:
            return ok
        case {"v": 1, "err": {"code": str(code), "message": str(message)}}:
            raise Refused(code, message)
    raise Internal("the pod's agent answers in another form than was agreed")
