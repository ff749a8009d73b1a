"""K8E's ids as they stand in requests, with an error of K8E's kind for what is none. The words are in `surfaces/k8e`."""

from __future__ import annotations

from atoll.errors import InvalidArgument, NotFound
from atoll.model import SandboxInfo
from atoll.words import k8e as words


def session_ref(text: str, field: str = "session_id") -> str:
    """Return what core looks a session up by."""
    if not text:
        raise InvalidArgument(f"{field} is required")
    if len(text) > 256 or "\0" in text:
        raise InvalidArgument(f"{field} is not a session id")
    return words.session_ref(text)


def session_id(info: SandboxInfo) -> str:
    return words.session_id(info.id, info.parent_id, info.labels)


def parse_run(text: str) -> tuple[str, str]:
    return _found(words.split_run_id(text), text, "run_id")


def parse_terminal(text: str) -> tuple[str, str]:
    return _found(words.split_terminal_id(text), text, "terminal_id")


def tenant(text: str) -> str:
    """Return a tenant's name, checked."""
    if text and not words.is_tenant(text):
        raise InvalidArgument(f"tenant_id must be {words.TENANT_RULE}")
    return text


def _found(pair: tuple[str, str] | None, text: str, field: str) -> tuple[str, str]:
    if not text:
        raise InvalidArgument(f"{field} is required")
    if pair is None:
        raise NotFound(f"{field} {text!r:.120} not found")
    return pair
