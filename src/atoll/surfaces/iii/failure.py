"""Errors of the functions: one envelope with a code, a kind, whether to retry and a fix that can be merged and sent again."""

import json
from collections.abc import Mapping
from typing import NamedTuple, NotRequired, TypedDict

from atoll import errors

DOCS = "docs/compat/iii.md"


class Code(NamedTuple):
    """A row of the contract's table: the kind, the HTTP status where there is one, and the note a caller can act on."""

    type: str
    status: int
    note: str
    retryable: bool = False


CODES: dict[str, Code] = {
    "S001": Code("validation", 400, ""),
    "S002": Code("validation", 404, "no sandbox with this id was made here: call sandbox::create first"),
    "S003": Code(
        "validation",
        409,
        "one command at a time runs in a sandbox; waiting does not help with a program that stays in the foreground: start "
        "it detached (sh -c 'nohup PROGRAM >/tmp/log 2>&1 &'), or sandbox::stop and sandbox::create",
    ),
    "S004": Code("validation", 404, "this sandbox was stopped or reaped: sandbox::create a new one"),
    "S100": Code("config", 400, ""),
    "S101": Code("internal", 500, "the operator must pull this image beforehand, or set auto_install: true"),
    "S102": Code("transient", 503, "the image could not be had; try again later", True),
    "S200": Code("execution", 504, "raise timeout_ms, or split the work into shorter commands"),
    "S210": Code("filesystem", 400, ""),
    "S211": Code("filesystem", 404, "the path does not exist"),
    "S212": Code("filesystem", 400, "sandbox::fs::ls lists directories, sandbox::fs::read reads files"),
    "S213": Code("filesystem", 409, "it exists already"),
    "S214": Code("filesystem", 409, "the directory is not empty; recursive: true removes it with all that is in it"),
    "S215": Code("filesystem", 403, "the sandbox's file system does not permit it"),
    "S216": Code("filesystem", 500, "the file operation failed"),
    "S217": Code("filesystem", 400, ""),
    "S218": Code("transient", 503, "the upload stopped before its end and nothing was written; send it again", True),
    "S219": Code("filesystem", 501, "this backend cannot do it"),
    "S300": Code("platform", 500, ""),
    "S400": Code("config", 429, ""),
}


Patch = Mapping[str, object]  # fields of a request that can be merged and sent again


class Envelope(TypedDict):
    type: str
    code: str
    message: str
    docs_url: str
    retryable: bool
    fix: Patch | None
    fix_note: str | None
    details: NotRequired[Mapping[str, object]]


class Failure(Exception):
    """The error answer of a function. Its text is the envelope."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        fix: Patch | None = None,
        note: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        self.code = code
        self.message = message.encode("utf-8", "replace").decode()
        self.fix = fix
        self.note = note if note is not None else CODES[code].note or None
        self.details = details
        super().__init__(json.dumps(self.envelope()))

    def envelope(self) -> Envelope:
        kind = CODES[self.code]
        found: Envelope = {
            "type": kind.type,
            "code": self.code,
            "message": self.message,
            "docs_url": f"{DOCS}#{self.code}",
            "retryable": kind.retryable,
            "fix": self.fix,
            "fix_note": self.note,
        }
        if self.details is not None:
            found["details"] = self.details
        return found

    @property
    def status(self) -> int:
        return CODES[self.code].status


def _text(error: errors.AtollError) -> str:
    return error.message + (f" ({error.hint})" if error.hint else "")


def of_image(error: errors.AtollError) -> Failure:
    """Why there is no image to start from."""
    if isinstance(error, errors.ImageNotAllowed):
        return Failure("S100", _text(error), note="the operator allows: " + ", ".join(error.details.get("allowed", ())))
    return Failure("S102", _text(error))


def of_boot(error: errors.AtollError) -> Failure:
    """Why there is no sandbox."""
    if isinstance(error, errors.ImageNotAllowed):
        return of_image(error)
    if isinstance(error, errors.InvalidArgument):
        return Failure("S001", _text(error), note=CREATE_EXAMPLE)
    if isinstance(error, errors.PermissionDenied | errors.Exhausted):
        return Failure("S400", _text(error), note=_text(error))
    return Failure("S300", f"the sandbox could not be started: {_text(error)}")


def of_exec(error: errors.AtollError) -> Failure:
    """A command that could not be started, or whose sandbox went away under it."""
    if isinstance(error, errors.InvalidArgument):
        return Failure("S001", _text(error), note=EXEC_EXAMPLE)
    return Failure("S300", f"the sandbox was lost while the command ran: {_text(error)}")


FILE_CODES: tuple[tuple[type[errors.AtollError], str], ...] = (
    (errors.FileNotFound, "S211"),
    (errors.NotADirectory, "S212"),
    (errors.IsADirectory, "S212"),
    (errors.FileExists, "S213"),
    (errors.NotEmpty, "S214"),
    (errors.FilePermission, "S215"),
    (errors.Unsupported, "S219"),
)


def of_file(error: errors.AtollError) -> Failure:
    """Translate an error of the sandbox's file system."""
    if error.details.get("guest_code") == "bad_pattern":
        return Failure("S217", f"the pattern does not compile: {error.message}", note=error.message)
    for kind, code in FILE_CODES:
        if isinstance(error, kind):
            return Failure(code, _text(error))
    if isinstance(error, errors.InvalidArgument):
        return Failure("S210", _text(error), note=error.message)
    return Failure("S216", _text(error))


CREATE_EXAMPLE = '{"image": "python", "network": false, "env": {"KEY": "value"}}'
EXEC_EXAMPLE = '{"sandbox_id": "<uuid>", "cmd": "python3", "args": ["-c", "print(1)"]}'
