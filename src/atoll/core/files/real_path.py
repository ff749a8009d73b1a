"""Where a path inside a sandbox leads, as its agent sees it."""

from atoll import errors
from atoll.guest import GuestClient

MAX_LINKS = 40  # as the kernel's own limit


async def real_path(client: GuestClient, path: bytes, *, last: bool = True) -> bytes:
    """The path without links, `.` and `..`; with `last` false the last part is not followed.

    Parts that are not there are kept as they are named. What the agent refuses to look at is an error."""
    todo, links, there = path.split(b"/")[::-1], 0, True
    done: list[bytes] = []
    while todo:
        part = todo.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            done = done[:-1]
            continue
        done.append(part)
        if not there or (not last and not any(one.strip(b"/") for one in todo)):
            continue
        try:
            found = (await client.request("stat", path=b"/" + b"/".join(done))).get("stat")
        except (errors.FileNotFound, errors.NotADirectory):
            there = False
            continue
        target = found.get("target") if isinstance(found, dict) else None
        if target is None:
            continue
        links += 1
        if links > MAX_LINKS:
            raise errors.InvalidArgument("the path leads through too many links")
        whole = target if isinstance(target, bytes) else str(target).encode("utf-8", "surrogateescape")
        done = [] if whole.startswith(b"/") else done[:-1]
        todo += whole.split(b"/")[::-1]
    return b"/" + b"/".join(done)
