"""Every error atoll raises, on both sides of every wire.

    AtollError                      code                  HTTP  retry
    ├── InvalidArgument             invalid_argument      400   no       the request is wrong; change it
    │   ├── TooLarge                too_large             413   no
    │   ├── UserNotFound            user_not_found        400   no       the sandbox has no such user or group
    │   └── ImageNotAllowed         image_not_allowed     403   no       the operator's allowlist does not name it
    ├── Unauthenticated             unauthenticated       401   no
    ├── PermissionDenied            permission_denied     403   no       known caller, not allowed
    ├── NotFound                    not_found             404   no       no such thing, or not yours
    │   ├── SandboxGone             sandbox_gone          404   no       it existed and has ended; details.reason says how
    │   └── FileNotFound            file_not_found        404   no
    ├── Conflict                    conflict              409   no
    │   ├── AlreadyExists           already_exists        409   no
    │   │   └── FileExists          file_exists           409   no
    │   └── FailedPrecondition      failed_precondition   409   no       not in the state this needs
    ├── FileError                   file_error            400   no       the sandbox's file system said no
    │   ├── NotADirectory           not_a_directory       400   no
    │   ├── IsADirectory            is_a_directory        400   no
    │   ├── NotEmpty                not_empty             400   no
    │   └── FilePermission          file_permission       403   no
    ├── Exhausted                   exhausted             429   yes      a limit was reached
    │   ├── RateLimited             rate_limited          429   yes
    │   └── DiskFull                disk_full             507   no
    ├── Unsupported                 unsupported           501   no       this host or runtime cannot do or enforce it
    ├── ImageError                  image_error           502   no       pull, unpack or build failed
    ├── Timeout                     timeout               504   no       our own deadline passed (never a command's)
    ├── Unavailable                 unavailable           503   yes      nothing ran; try again
    │   └── DaemonUnreachable       daemon_unreachable    503   yes
    ├── Cancelled                   cancelled             499   no
    ├── OutcomeUnknown              outcome_unknown       500   never    it may have run; look before repeating
    └── Internal                    internal              500   no       a bug in atoll

An error crosses the wire as `to_wire()` and is raised again by `from_wire()` as the same class with the same code.
Codes are stable: clients may match on them.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` itself costs a third of a bare interpreter's start, and the CLI's hot path passes here
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar, NotRequired, TypedDict

    class ErrorFields(TypedDict):
        """An error as every wire has it."""

        code: str
        message: str
        retry: str
        hint: NotRequired[str]
        details: NotRequired[dict[str, Any]]


class AtollError(Exception):
    """Base of all: a stable code, a message for a person, whether to retry, and what to do about it."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retry: ClassVar[str] = "no"  # "no", "yes" (nothing happened) or "never" (it may have happened)

    def __init__(self, message: str, *, hint: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: Mapping[str, Any] = details or {}

    def to_wire(self) -> ErrorFields:
        wire: ErrorFields = {"code": self.code, "message": self.message, "retry": self.retry}
        if self.hint:
            wire["hint"] = self.hint
        if self.details:
            wire["details"] = dict(self.details)
        return wire


class InvalidArgument(AtollError):
    """The request itself is wrong; sending it again cannot help."""

    code, http_status = "invalid_argument", 400


class TooLarge(InvalidArgument):
    """More bytes or entries than are accepted in one request."""

    code, http_status = "too_large", 413


class UserNotFound(InvalidArgument):
    """The sandbox has no user or group of this name."""

    code, http_status = "user_not_found", 400


class BuildFailed(InvalidArgument):
    """A step of an image build ended with an error of its own; the details have its line."""

    code, http_status = "build_failed", 422


class ImageNotAllowed(InvalidArgument):
    """The operator's allowlist does not name this image."""

    code, http_status = "image_not_allowed", 403


class Unauthenticated(AtollError):
    """No credential, or one that is wrong, expired or revoked."""

    code, http_status = "unauthenticated", 401


class PermissionDenied(AtollError):
    """The caller is known and may not do this."""

    code, http_status = "permission_denied", 403


class NotFound(AtollError):
    """No such thing, or it belongs to somebody else: the two answers are the same."""

    code, http_status = "not_found", 404


class SandboxGone(NotFound):
    """The sandbox existed and has ended; `details["reason"]` says how."""

    code, http_status = "sandbox_gone", 404


class FileNotFound(NotFound):
    """No such file or directory inside the sandbox."""

    code, http_status = "file_not_found", 404


class Conflict(AtollError):
    """The request clashes with the present state."""

    code, http_status = "conflict", 409


class AlreadyExists(Conflict):
    """The name is taken."""

    code, http_status = "already_exists", 409


class FileExists(AlreadyExists):
    """The path exists inside the sandbox and may not be replaced."""

    code, http_status = "file_exists", 409


class FailedPrecondition(Conflict):
    """The thing is not in the state this operation needs."""

    code, http_status = "failed_precondition", 409


class FileError(AtollError):
    """The sandbox's own file system refused; `details["errno"]` names why."""

    code, http_status = "file_error", 400


class NotADirectory(FileError):
    """A directory was needed."""

    code, http_status = "not_a_directory", 400


class IsADirectory(FileError):
    """A file was needed."""

    code, http_status = "is_a_directory", 400


class NotEmpty(FileError):
    """A directory with entries needs `recursive`."""

    code, http_status = "not_empty", 400


class FilePermission(FileError):
    """Permission denied by the sandbox's file system."""

    code, http_status = "file_permission", 403


class Exhausted(AtollError):
    """A limit was reached; it may pass."""

    code, http_status, retry = "exhausted", 429, "yes"


class RateLimited(Exhausted):
    """Too many requests from this principal."""

    code, http_status = "rate_limited", 429


class DiskFull(Exhausted):
    """The sandbox's disk, or the host's, is full."""

    code, http_status, retry = "disk_full", 507, "no"


class Unsupported(AtollError):
    """This host, runtime or image cannot do or enforce what was asked."""

    code, http_status = "unsupported", 501


class ImageError(AtollError):
    """An image could not be pulled, verified, unpacked or built."""

    code, http_status = "image_error", 502


class Timeout(AtollError):
    """A deadline of atoll's own passed. A command's timeout is a normal result, never this."""

    code, http_status = "timeout", 504


class Unavailable(AtollError):
    """A part is not there right now; nothing was run."""

    code, http_status, retry = "unavailable", 503, "yes"


class DaemonUnreachable(Unavailable):
    """The daemon does not answer and could not be started."""

    code = "daemon_unreachable"


class Cancelled(AtollError):
    """The caller went away or asked to stop."""

    code, http_status = "cancelled", 499


class OutcomeUnknown(AtollError):
    """The answer was lost after the work may have begun. Look before doing it again; atoll never repeats it by itself."""

    code, http_status, retry = "outcome_unknown", 500, "never"


class Internal(AtollError):
    """A bug in atoll."""


def _subclasses(cls: type[AtollError]) -> list[type[AtollError]]:
    return [cls] + [s for c in cls.__subclasses__() for s in _subclasses(c)]


BY_CODE: dict[str, type[AtollError]] = {c.code: c for c in _subclasses(AtollError) if c is not AtollError}


def from_wire(wire: Mapping[str, object]) -> AtollError:
    """Rebuild the error a peer sent; an unknown code becomes Internal with the code kept in details."""
    cls = BY_CODE.get(str(wire.get("code", "")))
    details = wire.get("details")
    details = dict(details) if isinstance(details, dict) else {}
    if cls is None:
        cls, details = Internal, {**details, "code": wire.get("code")}
    return cls(str(wire.get("message", "unknown error")), hint=str(wire.get("hint", "")), details=details)
