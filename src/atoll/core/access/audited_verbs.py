"""Every verb that changes something is written down: before its effect, and how it ended. This is the one place.

`Auditing.watch` takes the verbs of one part of core and puts a wrapper around each, so that no door, and no other verb that
uses it, passes by. What cannot be written down is not done, except endings: those are done, their answer says what could not
be recorded, and the record follows when there is room.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import msgspec

from atoll import errors
from atoll.accounts import AUDIT, owner
from atoll.core.access.audit import MAX_DETAILS, Audit, Owed
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.principals import Principal
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.reserve import FULL
from atoll.model import ALIAS

SOURCE: ContextVar[str] = ContextVar("atoll-source", default="")  # where a call came from, set by the doors
SHOWN = 500
DAY, FRAME = 86400, 1024  # bytes of both records of a call, without what its caller chose
READING = frozenset(("stat", "du"))  # of the file operations that are one question: those that change nothing
FIELDS = ("name", "image", "runtime", "profile", "command", "argv", "code", "language", "user", "path", "src", "dst",
          "target", "action", "port", "host", "hosts", "more_hosts", "add", "remove", "full", "force", "lifetime_s", "idle_timeout_s",
          "require_approval")  # fmt: skip  # of a request: what is written down. Never env, content or secrets
ENDINGS = frozenset(("destroy", "stop", "pause", "commands.kill", "commands.signal", "ports.unexpose", "secrets.remove",
                     "snapshots.delete"))  # fmt: skip  # what frees something, or takes a right away
RENAMED = {"action": "asked", "source": "from"}  # words the record itself has another meaning for

Verb = Callable[..., Any]


class Auditing:
    def __init__(self, audit: Audit, sandboxes: Sandboxes) -> None:
        self.audit = audit
        self._sandboxes = sandboxes
        self._day = 0  # since 1970: a key's audit bytes are counted for one day
        self._counted: set[str] = set()

    def watch(self, part: Any, *verbs: str, of: str = "", on_sandbox: bool = True) -> None:
        """Wrap these methods of `part`; their first argument is the principal and, unless said, the next the sandbox."""
        for name in verbs:
            verb = getattr(part, name)
            action = f"{of}.{name}" if of else name
            names = list(inspect.signature(verb).parameters)
            wrap = self._stream if inspect.isasyncgenfunction(verb) else self._call
            setattr(part, name, wrap(verb, action, names, on_sandbox))

    def _call(self, verb: Verb, action: str, names: list[str], on_sandbox: bool) -> Verb:
        async def audited(who: Principal, *args: Any, **options: Any) -> Any:
            entry = self._begin(action, names, on_sandbox, who, args, options)
            if entry is None:
                return await verb(who, *args, **options)
            try:
                answer = await verb(who, *args, **options)
            except BaseException as error:
                self._end(entry, _failure(error))
                raise
            self._end(entry, "ok", answer)
            return answer

        return audited

    def _stream(self, verb: Verb, action: str, names: list[str], on_sandbox: bool) -> Verb:
        async def audited(who: Principal, *args: Any, **options: Any) -> AsyncIterator[Any]:
            entry = self._begin(action, names, on_sandbox, who, args, options)
            last: Any = None
            items = verb(who, *args, **options)
            try:
                async for last in items:
                    yield last
            except BaseException as error:
                if entry is not None:
                    self._end(entry, _failure(error))
                raise
            finally:
                await items.aclose()
            if entry is not None:
                self._end(entry, "ok", last)

        return audited

    def _begin(
        self,
        action: str,
        names: list[str],
        on_sandbox: bool,
        who: Principal,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> dict[str, Any] | None:
        given = dict(zip(names[1:], args, strict=False)) | options
        if action == "files.ask":
            if given["op"] in READING:
                return None
            action = f"files.{given['op']}"
        sandbox = self._id(who, str(given.get("ref", ""))) if on_sandbox else ""
        details: dict[str, Any] = {}
        for key, value in given.items():
            if key == "ref":
                continue
            if isinstance(value, msgspec.Struct):
                details.update(_fields(value))
            elif key in FIELDS or key in ("approval", "approved", "reason", "key", "signal"):
                details[key] = _shown(value)
        who_said = {"who": who.owner, "action": action, "sandbox": sandbox, "source": SOURCE.get() or who.kind}
        record = {**who_said, "result": "begun", **{RENAMED.get(key, key): v for key, v in details.items()}}
        if action not in ENDINGS:
            self._charge(who, details)
        of = self.audit.record_or_owe(**record) if action in ENDINGS else self._write(**record)
        return {**who_said, "of": of}

    def _charge(self, who: Principal, details: dict[str, Any]) -> None:
        """Count what a key has written down today; Exhausted beyond its cap. Nobody can push out the records of others."""
        if not isinstance(who, KeyHolder):
            return
        accounts = self._sandboxes.accounts
        if (today := int(time.time() // DAY)) != self._day:
            for name in self._counted:
                accounts.release(AUDIT, accounts.held(AUDIT, owner(name)), owner(name))
            self._day, self._counted = today, set()
        size = FRAME + min(MAX_DETAILS, sum(len(str(value)) for value in details.values()))
        accounts.charge(AUDIT, size, owner(who.owner))
        self._counted.add(who.owner)

    def _end(self, entry: dict[str, Any], result: str, answer: Any = None) -> None:
        made = getattr(answer, "id", None)
        if not entry["sandbox"] and isinstance(made, str):
            entry = {**entry, "sandbox": made}
        if isinstance(owed := entry["of"], Owed):
            if hasattr(answer, "unrecorded"):
                answer.unrecorded = [*(answer.unrecorded or ()), "audit"]
            if not owed.seq:
                owed.record["result"] = result
                return
            entry = {**entry, "of": owed.seq}
        code = getattr(answer, "exit_code", None)
        self.audit.record_end(**entry, result=result, **({} if code is None else {"exit_code": code}))

    def _write(self, **record: Any) -> int:
        try:
            return self.audit.record(**record)
        except OSError as error:
            raise _unwritable(error) from error

    def _id(self, who: Principal, ref: str) -> str:
        """The sandbox's own id where there is one, else what was asked for."""
        if (who.owner, ref) in self._sandboxes.live:
            return ref
        try:
            row = self._sandboxes.find(who, ref) if ALIAS.match(ref) else None
        except errors.AtollError:  # a store that cannot be read
            row = None
        return str(row["id"]) if row is not None else ref[:256].encode("utf-8", "backslashreplace").decode()


def _unwritable(error: OSError) -> errors.AtollError:
    if error.errno in FULL:
        return errors.DiskFull(
            "the host's disk is full: nothing new is begun, because it could not be written down",
            hint="free space below ATOLL_HOME; destroy and stop work meanwhile",
        )
    return errors.Unavailable(f"the audit log cannot be written: {error.strerror}")


def _fields(request: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(request, name, None)
        if value not in (None, "", [], False):
            found[name] = _shown(value)
    return found


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        text = value.encode("utf-8", "backslashreplace").decode()
        return text if len(text) <= SHOWN else text[:SHOWN] + "..."
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value[:32]]
    return value if isinstance(value, int | float | bool) else str(value)[:SHOWN]


def _failure(error: BaseException) -> str:
    if isinstance(error, errors.AtollError):
        return error.code
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    return "internal"
