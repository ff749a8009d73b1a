"""`sandbox confirm`, `approve`, `reject` and `approvals`: one side asks, the other decides at a terminal of its own."""

from __future__ import annotations

import os

from ..client import calls
from ..client.http import quote
from ..errors import InvalidArgument, PermissionDenied
from .output import print_json, say
from .session import open_link, reference, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..client._sync.driver import Link
    from .grammar import Arguments


def confirm(arguments: Arguments) -> int:
    """Ask, and wait for the decision. What is printed is the id, which alone approves nothing."""
    link = open_link(arguments)
    approval = arguments.approval_id
    if approval is None:
        if len(arguments.rest) != 2:
            raise InvalidArgument("confirm needs an ID and an action, or --approval-id of an earlier one")
        target = calls.sandbox_path(reference(arguments.rest[0]), "approvals")
        approval = link.call(calls.post(target, {"action": arguments.rest[1]}))["id"]
    elif arguments.rest:
        raise InvalidArgument("--approval-id stands alone")
    say(f"atoll: approve this in another terminal: atoll sandbox approve {approval}")
    if arguments.no_wait:
        print_json({"approved": False, "approval_id": approval, "status": "pending"})
        return 0
    call = calls.post(_path(approval, "wait"), {"timeout_s": arguments.timeout})
    call.timeout = arguments.timeout + calls.GRACE
    wire = link.call(call)
    found = {"approved": wire["status"] == "approved", "approval_id": approval, "status": wire["status"]}
    if wire.get("reason"):
        found["reason"] = wire["reason"]
    print_json(found)
    return 0 if found["approved"] else 1


def approve(arguments: Arguments) -> int:
    return _decide(arguments, not arguments.reject)


def reject(arguments: Arguments) -> int:
    return _decide(arguments, False)


def _decide(arguments: Arguments, approved: bool) -> int:
    link, approval = open_link(arguments), arguments.rest[0]
    fields = {"approved": approved, "reason": arguments.reason or ""}
    try:
        wire = link.call(calls.post(_path(approval, "decide"), fields))
    except PermissionDenied as refused:
        if not refused.details.get("challenge"):
            raise
        answer = answer_on_terminal(link, calls.post(_path(approval, "challenge"), {}))
        wire = link.call(calls.post(_path(approval, "decide"), {**fields, "answer": answer}))
    print_json({"ok": True, "approval_id": approval, "status": wire["status"]})
    return 0


def answer_on_terminal(link: Link, challenge: calls.Call) -> str:
    """The daemon writes a number on this terminal; the person types it, and nothing else can."""
    try:
        keyboard = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        raise PermissionDenied("deciding needs a terminal", hint="run this in a terminal of your own") from None
    try:
        link.call(challenge)
        return os.read(keyboard, 100).decode("utf-8", "replace").strip()
    finally:
        os.close(keyboard)


def pending(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.get("/v1/approvals"))
    found = [
        {
            "approval_id": item["id"],
            "session_id": shown(item["sandbox_id"]),
            "kind": item["kind"],
            "action": item["action"],
            "requested_at": int(item["requested_at"]),
            "expires_at": int(item["expires_at"]),
        }
        for item in wire["approvals"]
    ]
    print_json({"approvals": found})
    return 0


def _path(approval: str, verb: str) -> str:
    if not approval or "/" in approval or approval in (".", ".."):
        raise InvalidArgument(f"{approval!r:.120} is not an approval's id")
    return f"/v1/approvals/{quote(approval)}/{verb}"
