"""Snapshots: the files of a sandbox, kept by content, and new sandboxes made from them.

A save asks the agent for the list of files and reads only those that changed since the last snapshot of the same sandbox:
size, times and inode number tell, and ctime cannot be set back from inside. A restore is an ordinary create under today's
rules, and then the files. Nothing but files is carried over: no approval, no port, no key, no host list.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from atoll import errors, labels
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal, local
from atoll.core.commands.history import History
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.typed import SandboxRow
from atoll.core.workers import Workers
from atoll.core.workspaces import archive as archive
from atoll.core.workspaces.chunks import ChunkStore
from atoll.core.workspaces.index import DIRECTORY, GONE, Entry, Head, Shelf, check_name
from atoll.core.workspaces.published_manifests import Manifests
from atoll.core.workspaces.snapshot_reader import Capture, Seen, as_path
from atoll.guest import GuestClient
from atoll.model import CreateSandbox, SandboxInfo, SaveSnapshot, SnapshotDetails, SnapshotFile, SnapshotInfo

log = logging.getLogger("atoll.snapshots")

REMEMBERED = 32  # sandboxes whose last listing is kept, so that their next save reads only what changed
SHOWN_FILES = 10_000
Texts = list[str]
Entries = list[Entry]
REMOVED_AT_ONCE = 64
KINDS = {"f": "file", "d": "directory", "l": "symlink", "h": "file", "w": "deleted"}


class Snapshots(Part):
    """Every snapshot, each seen by its owner alone."""

    def __init__(self, sandboxes: Sandboxes, history: History, home: Path, workers: Workers) -> None:
        self._sandboxes = sandboxes
        self._workers = workers
        self._history = history
        self._root = home / "snapshots"
        self._manifests = Manifests(self._root / "manifests")
        self._opened: Shelf | None = None
        self._stores: dict[str, ChunkStore] = {}
        self._opening = threading.Lock()
        self._seen: OrderedDict[str, Seen] = OrderedDict()
        self._busy: set[tuple[str, str]] = set()
        self._writers = 0  # who is putting content into the store that no snapshot names yet
        self._gate = asyncio.Lock()  # held while content is collected
        self._due: set[str] = set()  # owners with content that no snapshot of theirs may name any more

    # The verbs

    @verb("snapshots.save")
    async def save(self, who: Principal, ref: str, request: SaveSnapshot) -> SnapshotInfo:
        """Keep the files of a running or stopped sandbox under a name."""
        name = check_name(request.name)
        row = self._sandboxes.known(who, ref)
        async with self._writing(who.owner, name, request.force):
            async with self._sandboxes.visit(who, ref) as client:
                capture = Capture(client, self._chunks(who.owner), self._seen.get(row["id"], {}))
                if request.full:
                    mounts = [*row["spec"].get("mounts", ()), *row["spec"].get("volumes", ())]
                    targets = [mount["target"] for mount in mounts]
                    await capture.system(row["created_at"], targets, lambda: self._twin(who, row))
                else:
                    await capture.workspace()
            head = self._head(who, name, row, capture, request.full)
            await self._workers.run(head["owner"], self._keep, head, capture.entries)
            if not request.full:
                self._remember(row["id"], capture.seen)
        self._history.record(row["id"], who.owner, "snapshot", name=name, bytes=head["size_bytes"], by=who.owner)
        return _info(head)

    @verb("snapshots.list")
    async def list(self, who: Principal) -> list[SnapshotInfo]:
        heads = await self._workers.run(who.owner, lambda: list(self._shelf.heads(who.owner)))
        return [_info(head) for head in sorted(heads, key=lambda head: float(head["created_at"]))]

    @verb("snapshots.names")
    async def names(self, who: Principal) -> Texts:
        return [info.name for info in await self.list(who)]

    @verb("snapshots.inspect")
    async def inspect(self, who: Principal, name: str) -> SnapshotDetails:
        return await self._workers.run(who.owner, self._inspect, who.owner, check_name(name))

    @verb("snapshots.restore")
    async def restore(self, who: Principal, name: str, spec: CreateSandbox | None = None) -> SandboxInfo:
        """A new sandbox with these files. Everything is verified; what cannot be is an error and leaves no sandbox."""
        head, entries = await self._workers.run(who.owner, self._shelf.entries, who.owner, check_name(name))
        chunks = self._chunks(who.owner)
        if missing := {digest for entry in entries for digest in entry.chunks if not chunks.has(digest)}:
            raise errors.Internal(f"snapshot {name!r} lacks {len(missing)} pieces of its content", hint="delete it")
        spec = spec or CreateSandbox()
        if head["full"] and not head.get("imported") and spec.image == CreateSandbox().image:
            spec = msgspec.structs.replace(spec, image=head["image"])
        info = await self._sandboxes.create(who, spec)
        try:
            async with self._sandboxes.visit(who, info.id) as client:
                await _remove(client, [entry.path for entry in entries if entry.kind == GONE])
                if kept := [entry for entry in entries if entry.kind != GONE]:
                    await client.upload(
                        "tar_in", archive.stream(chunks, kept), path="/" if head["full"] else "/workspace",
                        gzip=False, max_bytes=head["size_bytes"] + (len(entries) + 1) * 8192,
                        max_entries=3 * len(entries) + 1, same_owner=True, keep_setid=not head.get("imported"),
                    )  # fmt: skip
        except BaseException:
            await self._sandboxes.end(info.id, "failed", f"snapshot {name} could not be restored", who.owner)
            raise
        self._history.record(info.id, who.owner, "restored", name=name, by=who.owner)
        return await self._sandboxes.get(who, info.id)

    @verb("snapshots.delete")
    async def delete(self, who: Principal, name: str) -> int:
        """Gone at once; content that no other snapshot has goes with it. The bytes that freed."""
        check_name(name)
        if (who.owner, name) in self._busy:
            raise errors.FailedPrecondition(f"snapshot {name!r} is being written")
        if await self._workers.run(who.owner, self._manifests.delete, who.owner, name) and name not in await self.names(
            who
        ):
            return 0
        await self._workers.run(who.owner, self._shelf.delete, who.owner, name)
        return await self._sweep(who.owner)

    # K8E's registry: names and the digests of their content

    @verb("snapshots.get_manifest")
    async def get_manifest(self, who: Principal, name: str) -> Texts:
        """Return the digests that were published under this name, else those of a saved snapshot."""
        published = await self._workers.run(who.owner, self._manifests.get, who.owner, check_name(name))
        if published is not None:
            return published
        _, entries = await self._workers.run(who.owner, self._shelf.entries, who.owner, name)
        return list(dict.fromkeys(digest for entry in entries for digest in entry.chunks))

    @verb("snapshots.put_manifest")
    async def put_manifest(self, who: Principal, name: str, layers: Texts) -> None:
        """Publish the digests of a snapshot that its owner keeps elsewhere. They give no content."""
        await self._workers.run(who.owner, self._manifests.put, who.owner, check_name(name), layers)

    @verb("snapshots.manifest_names")
    async def manifest_names(self, who: Principal) -> Texts:
        """Return the names of saved snapshots and of published manifests."""
        published = await self._workers.run(who.owner, self._manifests.names, who.owner)
        return list(dict.fromkeys([*await self.names(who), *published]))

    # One file to carry away and bring back

    @verb("snapshots.export")
    @asynccontextmanager
    async def export(self, who: Principal, name: str) -> AsyncIterator[Path]:
        """The snapshot as an archive; the file is gone afterwards."""
        head, entries = await self._workers.run(who.owner, self._shelf.entries, who.owner, check_name(name))
        with self._scratch() as scratch:
            await self._workers.run(who.owner, archive.export, self._chunks(who.owner), head, entries, scratch)
            yield scratch

    @verb("snapshots.bring_in")
    async def bring_in(self, who: Principal, name: str, data: AsyncIterator[bytes], force: bool) -> SnapshotInfo:
        """A snapshot from an archive made by `export`, or by somebody who wants us harm."""
        check_name(name)
        chunks = self._chunks(who.owner)
        async with self._writing(who.owner, name, force):
            with self._scratch() as scratch:
                size = 0
                with await asyncio.to_thread(open, scratch, "wb") as file:
                    async for piece in data:
                        size += len(piece)
                        if size > archive.MAX_BYTES:
                            raise errors.TooLarge(f"an archive holds at most {archive.MAX_BYTES >> 30} GiB")
                        chunks.check_space(len(piece))
                        await asyncio.to_thread(file.write, piece)
                origin, entries = await self._workers.run(who.owner, archive.bring_in, chunks, scratch)
            size = sum(entry.size for entry in entries)
            head: Head = {**origin, "owner": who.owner, "name": name, "size_bytes": size, "file_count": _count(entries)}
            await self._workers.run(head["owner"], self._keep, head, entries)
        return _info(head)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A file name in the staging directory, which is emptied at the next start if we die now."""
        self._chunks(_own())
        path = self._root / "staging" / secrets.token_hex(16)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    # Inside

    def _keep(self, head: Head, entries: Entries) -> None:
        """Content first, then the list that names it: a crash in between leaves neither half a snapshot nor a hole in one."""
        self._chunks(head["owner"]).commit()
        self._shelf.save(head, entries)
        self._manifests.delete(head["owner"], head["name"])  # what was published is older

    @property
    def _shelf(self) -> Shelf:
        """Made when first needed: a daemon that never saves has no store."""
        if self._opened is None:
            self._opened = Shelf(self._root / "list")
        return self._opened

    def _chunks(self, owner: str) -> ChunkStore:
        """The owner's content. Nobody learns from what a save takes, or a deletion frees, whether others keep the same bytes."""
        with self._opening:
            if (store := self._stores.get(owner)) is None:
                name = hashlib.sha256(owner.encode()).hexdigest()[:32]
                root = self._root if owner == _own() else self._root / "others" / name
                store = ChunkStore(root, check=self._sandboxes.space.check)
                self._stores[owner] = store
            return store

    @asynccontextmanager
    async def _writing(self, owner: str, name: str, force: bool) -> AsyncIterator[None]:
        """One writer a name, and no sweep while new content has no snapshot yet that names it."""
        if (owner, name) in self._busy:
            raise errors.AlreadyExists(f"snapshot {name!r} is being written right now")
        if not force and self._shelf.exists(owner, name):
            raise errors.AlreadyExists(f"there is a snapshot {name!r} already", hint="--force replaces it")
        replaced = self._shelf.exists(owner, name)
        self._busy.add((owner, name))
        try:
            async with self._gate:
                self._writers += 1
            try:
                yield
                if replaced:
                    self._due.add(owner)
            except BaseException:
                self._due.add(owner)  # what was put has no snapshot that names it
                raise
            finally:
                self._writers -= 1
        finally:
            self._busy.discard((owner, name))
            if self._due:
                await self._sweep(owner)

    async def _sweep(self, owner: str) -> int:
        """Collect what no snapshot names, when nobody writes; else the last writer does it. What that freed of the owner's."""
        async with self._gate:
            self._due.add(owner)
            if self._writers > 0:
                return 0
            due, self._due = self._due, set()
            freed = {one: await self._workers.run(one, self._collect, one) for one in due}
            return freed[owner]

    def _collect(self, owner: str) -> int:
        try:
            return self._chunks(owner).sweep(self._shelf.referenced(owner))
        except errors.Internal as damaged:
            log.error("content is not collected, because a snapshot cannot be read: %s", damaged)
            return 0

    def _head(self, who: Principal, name: str, row: SandboxRow, capture: Capture, full: bool) -> Head:
        return {
            "owner": who.owner,
            "name": name,
            "created_at": time.time(),
            "sandbox_id": row["id"],
            "tenant": labels.tenant_of(row["spec"].get("labels")),
            "image": row["image"],
            "full": full,
            "size_bytes": sum(entry.size for entry in capture.entries),
            "file_count": _count(capture.entries),
            "stored_bytes": capture.stored,
            "skipped": capture.skipped,
        }

    @asynccontextmanager
    async def _twin(self, who: Principal, row: SandboxRow) -> AsyncIterator[GuestClient]:
        """A sandbox as this one was when it was new; gone afterwards."""
        spec = CreateSandbox(image=row["image"], runtime=row["runtime"], network=False, lifetime_s=3600.0)
        info = await self._sandboxes.create(who, spec)
        try:
            async with self._sandboxes.visit(who, info.id) as client:
                yield client
        finally:
            await self._sandboxes.end(info.id, "destroyed", "it was made to see what its image holds", who.owner)

    def _remember(self, sandbox: str, seen: Seen) -> None:
        self._seen[sandbox] = seen
        self._seen.move_to_end(sandbox)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def _inspect(self, owner: str, name: str) -> SnapshotDetails:
        head, entries = self._shelf.entries(owner, name)
        mine = {digest for entry in entries for digest in entry.chunks}
        others: set[str] = set()
        for other in self._shelf.heads(owner):
            if other["name"] != name:
                others.update(d for entry in self._shelf.entries(owner, other["name"])[1] for d in entry.chunks)
        files = [
            SnapshotFile(
                path=entry.path.decode("utf-8", "replace"), type=KINDS[entry.kind], mode=entry.mode, uid=entry.uid,
                gid=entry.gid, mtime=entry.mtime, size=entry.size, target=entry.target.decode("utf-8", "replace"),
            )
            for entry in entries[:SHOWN_FILES]
        ]  # fmt: skip
        return SnapshotDetails(
            **msgspec.structs.asdict(_info(head)),
            files=files,
            chunks=len(mine),
            shared_chunks=len(mine & others),
            missing_chunks=sum(1 for digest in mine if not self._chunks(owner).has(digest)),
        )


def _own() -> str:
    """The daemon's own user, whose content is at the top."""
    return local(os.geteuid(), os.getegid()).owner


def _count(entries: Entries) -> int:
    return sum(1 for entry in entries if entry.kind not in (DIRECTORY, GONE))


async def _remove(client: GuestClient, paths: list[bytes]) -> None:
    """Return the paths that the image has and the snapshot has not."""
    for start in range(0, len(paths), REMOVED_AT_ONCE):
        some = (b"/" + path for path in paths[start : start + REMOVED_AT_ONCE])
        await asyncio.gather(
            *(client.request("remove", path=as_path(path), recursive=True, missing_ok=True) for path in some)
        )


def _info(head: Head) -> SnapshotInfo:
    return msgspec.convert({name: head.get(name) for name in SnapshotInfo.__struct_fields__}, SnapshotInfo)
