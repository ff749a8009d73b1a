"""Translate refusals of the guest agent into errors of `atoll.errors`. Codes and texts are the claims of a hostile place."""

from typing import Any

from atoll import errors

_CLASSES: dict[str, type[errors.AtollError]] = {
    "invalid_argument": errors.InvalidArgument,
    "bad_pattern": errors.InvalidArgument,
    "user_not_found": errors.UserNotFound,
    "file_not_found": errors.FileNotFound,
    "file_exists": errors.FileExists,
    "not_a_directory": errors.NotADirectory,
    "is_a_directory": errors.IsADirectory,
    "not_empty": errors.NotEmpty,
    "file_permission": errors.FilePermission,
    "read_only": errors.FilePermission,
    "disk_full": errors.DiskFull,
    "name_too_long": errors.FileError,
    "not_a_regular_file": errors.FileError,
    "too_many_links": errors.FileError,
    "busy": errors.FileError,
    "cross_device": errors.FileError,
    "file_error": errors.FileError,
    "not_found": errors.NotFound,
    "gone": errors.NotFound,
    "already_exists": errors.AlreadyExists,
    "exhausted": errors.Exhausted,
    "unsupported": errors.Unsupported,
    "cancelled": errors.Cancelled,
    "refused": errors.FailedPrecondition,
    "internal": errors.Internal,
}
MAX_MESSAGE = 1000


class ProgramNotStarted(errors.FailedPrecondition):
    """The program is missing or not executable, so nothing ran. A shell would say 127 or 126."""

    def __init__(self, message: str, exit_code: int, guest_code: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.guest_code = guest_code


class ConnectionLost(Exception):
    """The channel to the agent broke in the middle of an operation. Never leaves `atoll.guest`'s callers in core."""


def refusal(err: Any) -> errors.AtollError:
    """The error for the `err` map of a RESULT, whatever is in it."""
    fields = err if isinstance(err, dict) else {}
    code, text, errno = fields.get("code"), fields.get("message"), fields.get("errno")
    message = text[:MAX_MESSAGE] if isinstance(text, str) and text else "the guest agent refused"
    if code == "program_not_found":
        return ProgramNotStarted(message, 127, code)
    if code == "program_not_executable":
        return ProgramNotStarted(message, 126, code)
    cls = _CLASSES.get(code) if isinstance(code, str) else None
    if cls is None:
        cls, message = errors.Internal, f"the guest answered {str(code)[:64]!r}: {message}"
    details: dict[str, object] = {}
    if isinstance(code, str) and code != cls.code:
        details["guest_code"] = code[:64]
    if isinstance(errno, int) and not isinstance(errno, bool):
        details["errno"] = errno
    return cls(message, details=details)
