"""Files inside a sandbox. Every operation is done by its agent; the host never opens a guest path itself.

Names may be any bytes. In answers a name that is not UTF-8 is shown with replacement characters and has its exact bytes
beside it as `<field>_b64`; requests may give them the same way.
"""

import asyncio
import base64
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from atoll import accounts, errors
from atoll.core.access.approval_rules import Gate
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.commands.history import History
from atoll.core.files.real_path import real_path
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.guest import ConnectionLost, Download, GuestClient, wire
from atoll.guest.connection import Bytes
from atoll.loop_turns import LoopTurns
from atoll.model import Request, check_path, unbase64

NAMES = ("path", "src", "dst", "target")
MAX_ENTRIES = 100_000
MAX_ANSWER = 32 * 1024 * 1024  # bytes of what the agent told that one answer holds
MAX_ACCOUNTS = 256 * 1024  # bytes of /etc/passwd and of /etc/group that are looked at
PART = 256  # entries that are looked at before others have their turn
LONG = 24 * 3600.0  # a walk of a large tree takes its time; the caller can go away
NUMBERS = ("size", "mode", "uid", "gid", "mtime", "ino", "nlink", "line", "offset", "replacements", "bytes", "inodes",
           "count", "removed", "updated", "files", "total")  # fmt: skip

Entry = wire.Message  # cleaned: what of it JSON can carry


class Files(Part):
    """The file operations, each as the guest protocol has it."""

    def __init__(self, sandboxes: Sandboxes, history: History, gate: Gate) -> None:
        self._sandboxes = sandboxes
        self._history = history
        self._gate = gate
        self._turns = LoopTurns()

    @verb("files", by="op")
    async def ask(self, who: Principal, ref: str, op: str, request: Request) -> Entry:
        """stat, mkdir, remove, move, copy, chmod, symlink, du, sed: one question, one answer."""
        fields = _fields(request, needs_path=op != "sed")
        live = await self._sandboxes.wake(who, ref)
        judged = await self._admit(who, live, op, fields)
        with live.use() as client:
            answer, events = await client.collect(op, timeout=LONG, **judged)
        earlier = [one for event in events for one in event.get("results") or () if isinstance(one, dict)]
        if earlier and isinstance(answer.get("results"), list):  # sed tells of many files in several parts
            found = [*earlier, *answer["results"]]
            return {**clean({**answer, "results": None}), "results": await self._clean_all(live, found)}
        return clean(answer)

    async def _clean_all(self, live: Live, entries: Sequence[Any]) -> Sequence[Entry]:
        """The entries as an answer holds them, made in pieces; others have their turn between them."""
        found: list[Entry] = []
        for start in range(0, len(entries), PART):
            await self._turns.turn(live.owner)
            found += [clean(entry) for entry in entries[start : start + PART] if isinstance(entry, dict)]
        return found

    @verb("files.list")
    async def list(self, who: Principal, ref: str, request: Request) -> Entry:
        return await self._gather(who, ref, "list", request, "entries")

    @verb("files.grep")
    async def grep(self, who: Principal, ref: str, request: Request) -> Entry:
        return await self._gather(who, ref, "grep", request, "matches")

    async def _gather(self, who: Principal, ref: str, op: str, request: Request, key: str) -> Entry:
        """The answer of `list` and `grep`, which only read: asked again when the channel breaks."""
        fields = _fields(request)
        if op == "list":
            fields.setdefault("limit", MAX_ENTRIES)
        live = await self._sandboxes.wake(who, ref)
        for attempt in (1, 2, 3):
            try:
                return await self._gather_once(live, op, fields, key)
            except ConnectionLost as lost:
                if attempt == 3:
                    raise live.client.over or errors.Unavailable(str(lost)) from None
        raise AssertionError("unreachable")

    async def _gather_once(self, live: Live, op: str, fields: Entry, key: str) -> Entry:
        """All that the agent tells, up to `MAX_ANSWER` bytes: what is beyond is left out, and `truncated` says so.

        Others have their turn after each part, and what is held is charged to the sandbox and its owner.
        """
        found: list[Any] = []
        holders = accounts.sandbox(live.id), accounts.owner(live.owner)
        with live.use() as client, self._sandboxes.accounts.lease(accounts.MEMORY, 0, *holders) as held:
            stream = await client.open(op, **fields)
            stream.slow_down = True
            try:
                async with asyncio.timeout(LONG):
                    async for item in stream:
                        if item.kind != wire.EVENT:
                            continue
                        held.grow(item.cost)
                        if held.amount > MAX_ANSWER:
                            return {**_told(op, found), key: found}
                        told = item.event.get(key)
                        found += await self._clean_all(live, told if isinstance(told, list) else [])
            except TimeoutError:
                raise errors.Timeout(f"the guest agent did not answer `{op}` in {LONG:g} s") from None
            finally:
                stream.cancel()
        return {**clean(stream.result), key: found}

    @verb("files.read")
    @asynccontextmanager
    async def read(
        self,
        who: Principal,
        ref: str,
        path: str,
        offset: int | None = None,
        limit: int | None = None,
        user: str | None = None,
    ) -> AsyncIterator[tuple[Entry, Download]]:
        """A file's stat, and its bytes to iterate over."""
        checked = _path(path)
        live = await self._sandboxes.wake(who, ref)
        with live.use() as client:
            async with await client.download("read", path=checked, offset=offset, limit=limit, user=user) as download:
                try:
                    head = await download.start()
                except ConnectionLost as lost:
                    raise client.over or errors.Unavailable(str(lost)) from None
                stat = head.get("file")
                self._record(live, "file_read", path)
                yield clean(stat) if isinstance(stat, dict) else {}, download

    @verb("files.accounts")
    async def accounts(self, who: Principal, ref: str) -> Entry:
        """Return the users and groups that the sandbox itself knows: `{"users": [...], "groups": [...]}`."""
        live = await self._sandboxes.wake(who, ref)
        with live.use() as client:
            passwd, group = await _text(client, "/etc/passwd"), await _text(client, "/etc/group")
        users = [
            {"name": fields[0], "uid": int(fields[2]), "gid": int(fields[3]), "home": fields[5]}
            for line in passwd.splitlines()
            if len(fields := line.split(":")) == 7 and _is_id(fields[2]) and _is_id(fields[3])
        ]
        groups = [
            {"name": fields[0], "gid": int(fields[2])}
            for line in group.splitlines()
            if len(fields := line.split(":")) == 4 and _is_id(fields[2])
        ]
        return {"users": users, "groups": groups}

    @verb("files.resolve")
    async def resolve(self, who: Principal, ref: str, path: str) -> str:
        """Return where a path leads, without links."""
        checked = _path(path)
        live = await self._sandboxes.wake(who, ref)
        with live.use() as client:
            found = await real_path(client, checked if isinstance(checked, bytes) else checked.encode())
        return found.decode("utf-8", "surrogateescape")

    @verb("files.tar_out")
    @asynccontextmanager
    async def tar_out(
        self, who: Principal, ref: str, path: str, gzip: bool = False, user: str | None = None
    ) -> AsyncIterator[Download]:
        checked = _path(path)
        live = await self._sandboxes.wake(who, ref)
        with live.use() as client:
            async with await client.download("tar_out", path=checked, gzip=gzip or None, user=user) as download:
                yield download

    @verb("files.write")
    async def write(
        self, who: Principal, ref: str, path: str, source: AsyncIterator[Bytes] | Bytes, **options: Any
    ) -> Entry:
        """Replace, append or patch a file. A source that breaks off leaves the old file whole."""
        return await self._upload(who, ref, "write", path, source, **options)

    @verb("files.tar_in")
    async def tar_in(
        self, who: Principal, ref: str, path: str, source: AsyncIterator[Bytes] | Bytes, **options: Any
    ) -> Entry:
        return await self._upload(who, ref, "tar_in", path, source, **options)

    async def _upload(
        self, who: Principal, ref: str, op: str, path: str, source: AsyncIterator[Bytes] | Bytes, **options: Any
    ) -> Entry:
        checked = _path(path)
        live = await self._sandboxes.wake(who, ref)
        judged = await self._admit(who, live, op, {"path": checked, **options})
        with live.use() as client:
            answer = clean(await client.upload(op, source, **judged))
        if op == "write":
            self._record(live, "file_write", path)
        return answer

    def _record(self, live: Live, kind: str, path: str) -> None:
        shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        self._history.record_later(live.id, live.owner, kind, path=shown)

    async def _admit(self, who: Principal, live: Live, op: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._gate.change(who, live, op, fields) if live.spec.require_approval else fields

    @verb("files.watch")
    async def watch(
        self, who: Principal, ref: str, path: str, recursive: bool, user: str | None = None
    ) -> AsyncIterator[Entry]:
        """`{"watching": True}` once nothing can be missed any more, then changes until the caller goes away."""
        checked = _path(path)
        live = await self._sandboxes.wake(who, ref)
        with live.use() as client:
            stream = await client.open("watch", path=checked, recursive=recursive, user=user)
            try:
                async for item in stream:
                    if item.kind != wire.EVENT:
                        continue
                    changes = item.event.get("changes")
                    if isinstance(changes, list):
                        yield {"changes": [clean(change) for change in changes if isinstance(change, dict)]}
                    elif item.event.get("overflow") is True:
                        yield {"overflow": True}
                    elif item.event.get("ready") is True:
                        yield {"watching": True}
            except ConnectionLost as lost:
                raise client.over or errors.Unavailable(f"the watch was cut: {lost}") from None
            finally:
                stream.cancel()


async def _text(client: GuestClient, path: str) -> str:
    """Return a small file of the sandbox as text; what is missing or not readable is empty."""
    pieces = []
    try:
        async with await client.download("read", path=path, limit=MAX_ACCOUNTS) as download:
            async for piece in download:
                pieces.append(bytes(piece))
    except (errors.FileError, errors.FileNotFound):
        return ""
    except ConnectionLost as lost:
        raise client.over or errors.Unavailable(str(lost)) from None
    return b"".join(pieces).decode("utf-8", "replace")


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def _told(op: str, found: list[Any]) -> Entry:
    """The answer to a list or a search that was cut."""
    told: Entry = {"count": len(found), "truncated": True}
    return {**told, "files": len({entry.get("path") for entry in found})} if op == "grep" else told


def _path(path: str) -> str | bytes:
    try:
        check_path("path", path)
        return wire.text(path)
    except UnicodeEncodeError:
        raise errors.InvalidArgument("the path is not valid Unicode") from None
    except ValueError as error:
        raise errors.InvalidArgument(str(error)) from None


def _fields(request: Request, *, needs_path: bool = True) -> Entry:
    """The request as the agent wants it: names as bytes where they are, defaults left out."""
    fields: Entry = {}
    for key, value in msgspec.structs.asdict(request).items():
        if value is None or key.endswith("_b64") or value == []:
            continue
        fields[key] = value
    for key in NAMES:
        encoded = getattr(request, f"{key}_b64", None)
        if encoded is not None:
            try:
                fields[key] = unbase64(f"{key}_b64", encoded)
            except ValueError as error:
                raise errors.InvalidArgument(str(error)) from None
            if b"\0" in fields[key] or not 0 < len(fields[key]) <= 4096:
                raise errors.InvalidArgument(f"{key}_b64 must be 1 to 4096 bytes without NUL")
        elif key in fields:
            fields[key] = _path(fields[key])
        elif needs_path and hasattr(request, key):
            raise errors.InvalidArgument(f"{key} is missing")
    return fields


def clean(value: Any) -> Entry:
    """Return the answer of the guest as JSON can carry it: names shown, numbers finite, nothing else let through."""
    if not isinstance(value, dict):
        return {}
    shown: Entry = {}
    for key, item in value.items():
        if isinstance(item, bytes):
            shown[key] = item.decode("utf-8", "replace")
            shown[f"{key}_b64"] = base64.b64encode(item).decode()
        elif isinstance(item, float):
            shown[key] = item if math.isfinite(item) else 0.0
        elif isinstance(item, dict):
            shown[key] = clean(item)
        elif isinstance(item, list):
            shown[key] = [clean(i) if isinstance(i, dict) else _scalar(i) for i in item]
        elif key in NUMBERS and not isinstance(item, int | list):
            shown[key] = 0
        else:
            shown[key] = item if isinstance(item, str | int | bool) else None
    return shown


def _scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str | int | bool) else None
