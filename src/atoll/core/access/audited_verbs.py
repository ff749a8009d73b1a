"""Around every verb of core: may the caller do this, and a record of its beginning and its end.

`@verb("commands.exec")` on a method names its row of `core/verbs.py`. Every door, and every other verb that uses the
method, passes through here. A verb that cannot be recorded is refused, except endings: those are done, their answer says
what could not be recorded, and the record follows when there is room.
"""

import asyncio
import functools
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import msgspec

from atoll import errors
from atoll.accounts import AUDIT, owner
from atoll.core.access.audit import MAX_DETAILS, Audit, Owed
from atoll.core.access.credentials import KeyHolder, require
from atoll.core.access.principals import Principal
from atoll.core.store.reserve import FULL
from atoll.core.verbs import VERBS, Scope, Verb
from atoll.model import ALIAS

if TYPE_CHECKING:
    from atoll.core.sandboxes.verbs import Sandboxes

SOURCE: ContextVar[str] = ContextVar("atoll-source", default="")  # where a call came from, set by the doors
SHOWN = 500
DAY, FRAME = 86400, 1024  # bytes of both records of a call, without what its caller chose
RENAMED = {"action": "asked", "source": "from"}  # words the record itself has another meaning for
_NOTHING: tuple[Any, ...] = (None, "", [], False, msgspec.UNSET)

Method = TypeVar("Method", bound=Callable[..., Any])
Answer = TypeVar("Answer")


class Caller(TypedDict):
    who: str
    action: str
    sandbox: str
    source: str


class Begun(Caller):
    """A call whose beginning is on record; `of` is the number of that record, or the record that is owed."""

    of: int | Owed


class Part:
    """A part of core with verbs. Core sets `auditing` before anything is served; without it no writing verb works."""

    auditing: "Auditing"


def authorise(who: Principal, scope: Scope) -> None:
    """PermissionDenied when a caller may not use a verb or a route of this scope."""
    if scope == "local":
        if who.kind != "local":
            raise errors.PermissionDenied(
                "only the daemon's own user may do this", hint="run it on the daemon's machine"
            )
    elif scope != "own":
        require(who, scope)


def verb(name: str, *, by: str = "") -> Callable[[Method], Method]:
    """Check and record each call of a method by its row. With `by`, the row's name ends with that argument's value."""

    def around(method: Method) -> Method:
        names = tuple(inspect.signature(method).parameters)[2:]  # after `self` and the caller
        if by:
            wrapped = _one_of_many(method, name, names, names.index(by))
        elif not (row := VERBS[name]).writes or row.through:
            wrapped = _checked(method, row)
        elif inspect.isasyncgenfunction(method):
            wrapped = _stream(method, row, names)
        else:
            wrapped = _call(method, row, names)
        wrapped = functools.wraps(method)(wrapped)
        wrapped.verb = name  # type: ignore[attr-defined]  # for the test that finds methods without a row
        return cast("Method", wrapped)

    return around


def _checked(method: Callable[..., Any], row: Verb) -> Callable[..., Any]:
    def checked(self: Part, who: Principal, *args: Any, **options: Any) -> Any:
        authorise(who, row.scope)
        return method(self, who, *args, **options)

    return checked


def _call(method: Callable[..., Any], row: Verb, names: tuple[str, ...]) -> Callable[..., Any]:
    async def audited(self: Part, who: Principal, *args: Any, **options: Any) -> Any:
        authorise(who, row.scope)
        auditing = self.auditing
        entry = auditing.begin(row, who, dict(zip(names, args, strict=False)) | options)
        try:
            answer = await method(self, who, *args, **options)
        except BaseException as error:
            auditing.end(entry, _failure(error))
            raise
        auditing.end(entry, "ok", answer)
        return answer

    return audited


def _one_of_many(method: Callable[..., Any], name: str, names: tuple[str, ...], at: int) -> Callable[..., Any]:
    rows = {
        found.name: _call(method, found, names) if found.writes else _checked(method, found) for found in VERBS.values()
    }

    async def chosen(self: Part, who: Principal, *args: Any, **options: Any) -> Any:
        which = args[at] if len(args) > at else options[names[at]]
        found = rows.get(f"{name}.{which}")
        if found is None:
            raise errors.InvalidArgument(f"no such operation: {which!r:.40}")
        return await found(self, who, *args, **options)

    return chosen


def _stream(method: Callable[..., Any], row: Verb, names: tuple[str, ...]) -> Callable[..., Any]:
    async def audited(self: Part, who: Principal, *args: Any, **options: Any) -> AsyncIterator[Any]:
        authorise(who, row.scope)
        auditing = self.auditing
        entry = auditing.begin(row, who, dict(zip(names, args, strict=False)) | options)
        last: Any = None
        items = method(self, who, *args, **options)
        try:
            async for last in items:
                yield last
        except BaseException as error:
            auditing.end(entry, _failure(error))
            raise
        finally:
            await items.aclose()
        auditing.end(entry, "ok", last)

    return audited


class Auditing:
    def __init__(self, audit: Audit, sandboxes: "Sandboxes") -> None:
        self.audit = audit
        self._sandboxes = sandboxes
        self._day = 0  # since 1970: a key's audit bytes are counted for one day
        self._counted: set[str] = set()
        self.counts: Counter[tuple[str, str]] = Counter()  # verb and result -> how often since the daemon started

    async def record(self, name: str, who: Principal, work: Awaitable[Answer], **given: Any) -> Answer:
        """Do the work of a verb that no part of core has a method for, as a method with `@verb(name)` would."""
        row = VERBS[name]
        try:
            authorise(who, row.scope)
            entry = self.begin(row, who, given)
        except BaseException:
            if inspect.iscoroutine(work):
                work.close()
            raise
        try:
            answer = await work
        except BaseException as error:
            self.end(entry, _failure(error))
            raise
        self.end(entry, "ok", answer)
        return answer

    def begin(self, row: Verb, who: Principal, given: Mapping[str, Any]) -> Begun:
        """Record that a verb begins. Returns what `end` needs."""
        sandbox = self._id(who, str(given.get("ref", ""))) if row.sandbox else ""
        details: dict[str, object] = {}
        requests = [value for value in given.values() if isinstance(value, msgspec.Struct)]
        for field in row.audited:
            if field in given:
                value = given[field]
            else:
                value = next((found for one in requests if (found := getattr(one, field, None)) is not None), None)
                if value in _NOTHING:
                    continue
            details[RENAMED.get(field, field)] = _shown(value)
        who_said: Caller = {
            "who": who.owner,
            "action": row.name,
            "sandbox": sandbox,
            "source": SOURCE.get() or who.kind,
        }
        record = {**who_said, "result": "begun", **details}
        if row.ending:
            self._charge_ending(who, details, sandbox)
            return {**who_said, "of": self.audit.record_or_owe(**record)}
        self._charge(who, details)
        return {**who_said, "of": self._write(**record)}

    def end(self, entry: Begun, result: str, answer: Any = None) -> None:
        """Record how a verb ended."""
        self.counts[entry["action"], result] += 1
        made = getattr(answer, "id", None)
        if not entry["sandbox"] and isinstance(made, str):
            entry = {**entry, "sandbox": made}
        if isinstance(owed := entry["of"], Owed):
            if isinstance(answer, dict):
                answer["unrecorded"] = ["audit"]
            elif hasattr(answer, "unrecorded"):
                answer.unrecorded = [*(answer.unrecorded or ()), "audit"]
            if not owed.seq:
                owed.record["result"] = result
                return
            entry = {**entry, "of": owed.seq}
        code = getattr(answer, "exit_code", None)
        self.audit.record_end(**entry, result=result, **({} if code is None else {"exit_code": code}))

    def _charge(self, who: Principal, details: Mapping[str, object]) -> None:
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

    def _charge_ending(self, who: Principal, details: Mapping[str, object], sandbox: str) -> None:
        """The same for an ending, which no cap keeps from a sandbox that has not ended. There are few of these; of endings of
        nothing there is no end."""
        try:
            self._charge(who, details)
        except errors.Exhausted:
            if (who.owner, sandbox) in self._sandboxes.live:
                return
            try:
                row = self._sandboxes.find(who, sandbox) if ALIAS.match(sandbox) else None
            except errors.AtollError:  # a store that cannot be read
                return
            if row is None or row["state"] == "ended":
                raise

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
