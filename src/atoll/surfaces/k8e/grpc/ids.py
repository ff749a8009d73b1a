"""K8E's ids, made from atoll's own and read back without keeping a table.

A sandbox is `sess-<id>`, a sub-agent `sess-<parent>-sub-<id>`, a background run `sess-<id>-bg-<command>`, a terminal
`term-<id>-<command>`. Every one is also understood without its prefix; anything else is a name its owner chose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from atoll.errors import InvalidArgument, NotFound
from atoll.model import SandboxInfo

SESSION_LABEL = "k8e.session"  # the id a client chose for itself at create
TENANT_LABEL = "k8e.tenant"

_CORE = r"[a-z2-7]{20}"
_COMMAND = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
_SESSION = re.compile(rf"(?:sess-)?(?:{_CORE}-sub-)?({_CORE})")
_RUN = re.compile(rf"(?:sess-)?(?:{_CORE}-sub-)?({_CORE})-bg-({_COMMAND})")
_TERMINAL = re.compile(rf"(?:term-)?({_CORE})-({_COMMAND})")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def session_ref(text: str, field: str = "session_id") -> str:
    """What core looks a session up by."""
    if not text:
        raise InvalidArgument(f"{field} is required")
    if len(text) > 256 or "\0" in text:
        raise InvalidArgument(f"{field} is not a session id")
    found = _SESSION.fullmatch(text)
    return found[1] if found else text


def session_id(info: SandboxInfo) -> str:
    """What a session is called here: the id its creator chose, else ours in K8E's form."""
    return shown_id(info.id, info.parent_id, info.labels)


def shown_id(sandbox: str, parent: str | None = None, labels: Mapping[str, str] = {}) -> str:
    return labels.get(SESSION_LABEL) or (f"sess-{parent}-sub-{sandbox}" if parent else f"sess-{sandbox}")


def run_id(sandbox: str, command: str) -> str:
    return f"sess-{sandbox}-bg-{command}"


def parse_run(text: str) -> tuple[str, str]:
    return _pair(_RUN, text, "run_id")


def terminal_id(sandbox: str, command: str) -> str:
    return f"term-{sandbox}-{command}"


def parse_terminal(text: str) -> tuple[str, str]:
    return _pair(_TERMINAL, text, "terminal_id")


def tenant(text: str) -> str:
    """A tenant's name ends up in file names of clients, so it has to look like one."""
    if text and (not _TENANT.fullmatch(text) or ".." in text):
        raise InvalidArgument(
            "tenant_id must be 1 to 63 letters, digits, `.`, `_` or `-`, starting with a letter or digit"
        )
    return text


def _pair(pattern: re.Pattern[str], text: str, field: str) -> tuple[str, str]:
    if not text:
        raise InvalidArgument(f"{field} is required")
    found = pattern.fullmatch(text)
    if found is None:
        raise NotFound(f"{field} {text!r:.120} not found")
    return found[1], found[2]
