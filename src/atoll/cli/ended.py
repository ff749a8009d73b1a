"""Explain a sandbox that is not there: the name of an ended one is told apart from a wrong one."""

from __future__ import annotations

import time

from ..client import calls
from ..errors import AtollError
from .session import open_link
from .tables import span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .grammar import Arguments

_WHY = {
    "idle": "nobody had used it for its idle timeout", "expired": "its lifetime was over",
    "destroyed": "it was removed", "evicted": "its files made room for newer ones",
}  # fmt: skip


def explain_end(error: AtollError, arguments: Arguments) -> None:
    """Add to `no sandbox 'NAME'` why the last one of that name ended, if there was one."""
    name = error.message.partition("'")[2].rpartition("'")[0]
    try:
        found = open_link(arguments, start=False).call(calls.list_sandboxes("ended", name))["sandboxes"]
    except AtollError:
        return
    if found and (end := found[-1].get("end")):
        why = _WHY.get(end["kind"]) or end.get("detail") or end["kind"]
        error.hint = f"the last one of that name ended {span(time.time() - end['at'])} ago: {why}"
