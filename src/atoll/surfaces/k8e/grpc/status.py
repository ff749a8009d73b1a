"""Errors of the core as gRPC statuses, and back: the code for any client, the whole error for ours.

Every failed call carries trailing metadata: `atoll-code` (the stable code), `atoll-retry`, and `atoll-error-bin`, the JSON
that `errors.from_wire` turns into the same exception again.
"""

from __future__ import annotations

import json

import grpc

from atoll import errors

CODE_KEY = "atoll-code"
RETRY_KEY = "atoll-retry"
WIRE_KEY = "atoll-error-bin"
_MAX_MESSAGE = 2000
_MAX_WIRE = 4096  # metadata beyond 8 KiB is refused by many clients

_STATUS: dict[type[errors.AtollError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ImageNotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FileError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FilePermission: grpc.StatusCode.PERMISSION_DENIED,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unsupported: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ImageError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Timeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.OutcomeUnknown: grpc.StatusCode.UNKNOWN,
    errors.Internal: grpc.StatusCode.INTERNAL,
}

# The meaning of a status when the peer is not atoll, or never got as far as atoll.
_ERROR: dict[grpc.StatusCode, type[errors.AtollError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Exhausted,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Timeout,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.INTERNAL: errors.Internal,
}


def meanings() -> list[tuple[grpc.StatusCode, type[errors.AtollError]]]:
    """Return what each status means when nothing more is sent with it."""
    return sorted(_ERROR.items(), key=lambda item: int(item[0].value[0]))


def status_of(error: errors.AtollError) -> grpc.StatusCode:
    """The status of the nearest class of the error that has one."""
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls]
    return grpc.StatusCode.INTERNAL


def message_of(error: errors.AtollError) -> str:
    """Return the message for a person. NotFound keeps these words: K8E's clients search for them."""
    text = f"{error.message} ({error.hint})" if error.hint else error.message
    if isinstance(error, errors.NotFound) and "not found" not in text:
        text = f"not found: {text}"
    return text.encode("utf-8", "replace").decode()[:_MAX_MESSAGE]


def trailers_of(error: errors.AtollError) -> tuple[tuple[str, str | bytes], ...]:
    wire = error.to_wire()
    packed = json.dumps(wire, default=str).encode()
    if len(packed) > _MAX_WIRE:
        packed = json.dumps(
            {"code": error.code, "message": error.message[:_MAX_MESSAGE], "retry": error.retry}
        ).encode()
    if len(packed) > _MAX_WIRE:
        packed = json.dumps({"code": error.code, "message": error.message[:500], "retry": error.retry}).encode()
    return ((CODE_KEY, error.code), (RETRY_KEY, error.retry), (WIRE_KEY, packed))


def error_of(failure: grpc.RpcError, *, acted: bool) -> errors.AtollError:
    """The exception a failed call stands for. `acted`: whether the call may have changed something before it was cut."""
    code, text = failure.code(), failure.details() or ""
    for name, value in failure.trailing_metadata() or ():
        if name == WIRE_KEY and isinstance(value, bytes):
            try:
                wire = json.loads(value)
            except ValueError:
                continue
            if isinstance(wire, dict):
                return errors.from_wire(wire)
    if code is grpc.StatusCode.UNAVAILABLE:
        # gRPC says so both when it never connected and when the connection broke under a running call.
        return _unreachable(text) if not acted or _never_connected(text) else _unknown(text)
    if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS):
        return _unknown(text) if acted else errors.Internal(text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and acted:
        return _unknown(text or "no answer in time")
    return _ERROR.get(code, errors.Internal)(text or code.name.lower())


def _never_connected(text: str) -> bool:
    return "failed to connect" in text.lower() or "name resolution" in text.lower() or "handshake" in text.lower()


def _unreachable(text: str) -> errors.AtollError:
    return errors.DaemonUnreachable(f"the gateway cannot be reached: {text}")


def _unknown(text: str) -> errors.AtollError:
    return errors.OutcomeUnknown(f"the answer was lost ({text}); the work may have been done")
