"""RPCs for the content of a session: files, transcript, events."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.core.commands.history import Event
from atoll.core.files.verbs import Entry
from atoll.errors import InvalidArgument, NotFound, TooLarge
from atoll.model import ListFiles, convert
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.words import k8e as words
from atoll.words import k8e_ids as ids

from .calls import user_inside
from .text import both_of, clean

WORKSPACE = "/workspace"
MAX_READ = 60 * 1024 * 1024
EVENTS_DEFAULT, EVENTS_MOST = 500, 10_000


class Content:
    core: Core

    async def WriteFile(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.session_id)
        if request.mode not in ("", "w", "a"):
            raise InvalidArgument("mode must be `w` (the default) or `a`")
        if request.content and request.content_bytes:
            raise InvalidArgument("only one of content and content_bytes")
        if request.permissions > 0o7777:
            raise InvalidArgument("permissions must be at most 07777")
        options: dict[str, Any] = {"parents": True, "user": user_inside()}
        if request.mode == "a":
            options["append"] = True
        if request.permissions:
            options["mode"] = request.permissions
        data = request.content_bytes or request.content.encode()
        await self.core.files.write(who, ref, _path(request), data, **options)
        return pb.WriteFileResponse(ok=True)

    async def ReadFile(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.session_id)
        pieces, size = [], 0
        async with self.core.files.read(who, ref, _path(request), limit=MAX_READ + 1, user=user_inside()) as (
            _,
            download,
        ):
            async for piece in download:
                size += len(piece)
                if size > MAX_READ:
                    raise TooLarge(
                        f"the file is larger than {MAX_READ} bytes, too much for one message",
                        hint="read it over HTTPS, on the same port",
                    )
                pieces.append(bytes(piece))
        text, exact = both_of(b"".join(pieces))
        return pb.ReadFileResponse(content=text, content_bytes=exact)

    async def ListFiles(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.session_id)
        if request.since < 0:
            raise InvalidArgument("since must not be negative")
        since = request.since or None
        asked = {"path": WORKSPACE, "recursive": True, "files_only": True, "since": since, "user": user_inside()}
        found = await self.core.files.list(who, ref, convert(ListFiles, asked))
        return pb.ListFilesResponse(files=[_entry(one) for one in found["entries"]])

    async def GetTranscript(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.session_id)
        window = await self.core.past.transcript(who, ref, request.offset, request.limit)
        output = clean(window["output"])
        return pb.GetTranscriptResponse(
            session_id=request.session_id,
            output=output,
            output_bytes=output.encode(),
            offset=window["offset"],
            next_offset=window["next_offset"],
            truncated_before=window["truncated_before"],
            eof=window["eof"],
        )

    async def GetEvents(self, who: Principal, request: Any) -> Any:
        """The newest, oldest first; of one session, or of all that the caller owns."""
        if request.limit < 0:
            raise InvalidArgument("limit must not be negative")
        limit = min(request.limit or EVENTS_DEFAULT, EVENTS_MOST)
        ref = ids.session_ref(request.session_id) if request.session_id else None
        kept, more = await self.core.past.events(who, ref, limit)
        names = {one["sandbox_id"]: "" for one in kept}
        for sandbox in names:
            names[sandbox] = self._session_of(who, sandbox)
        return pb.GetEventsResponse(
            events=[json.dumps(_event(one, names[one["sandbox_id"]]), default=str) for one in kept],
            truncated=more,
            returned=len(kept),
        )

    def _session_of(self, who: Principal, sandbox: str) -> str:
        """Return the id by which the caller knows a session, also one that has ended."""
        try:
            row = self.core.sandboxes.known(who, sandbox)
        except NotFound:
            return words.session_id(sandbox)
        return words.session_id(sandbox, row["parent_id"], row["spec"].get("labels", {}))


def _path(request: Any) -> str:
    if request.path and request.path_bytes:
        raise InvalidArgument("only one of path and path_bytes")
    path: str = request.path or request.path_bytes.decode("utf-8", "surrogateescape")
    if not path:
        raise InvalidArgument("path is required")
    return path


def _entry(one: Entry) -> Any:
    exact = base64.b64decode(one["path_b64"]) if one.get("path_b64") else str(one.get("path", "")).encode()
    modified, size = one.get("mtime"), one.get("size")
    return pb.FileEntry(
        path=clean(one.get("path", "")),
        path_bytes=exact,
        modified=_int64(modified),
        size=_int64(size),
        type=clean(one.get("type", "")),
    )


def _int64(value: object) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < 2**62 else 0


# K8E's names of events; the others keep atoll's.
_EVENTS = {"command": "exec_end", "background": "bg_submit"}


def _event(one: Event, session: str) -> Mapping[str, object]:
    """Return an event with K8E's short names beside ours."""
    kind = str(one.get("kind"))
    shown = {"t": int(one.get("at") or 0), "ev": _EVENTS.get(kind, kind), "sid": session, **one}
    if kind == "background":
        shown["run_id"] = words.run_id(str(one["sandbox_id"]), str(one["command_id"]))
    return shown
