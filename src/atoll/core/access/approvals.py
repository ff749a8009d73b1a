"""Approvals: a caller asks, somebody else decides, once, within five minutes.

An approval is for one action, word for word, in one sandbox; it is used up by whoever waited for it. Who may decide: a key
with the approve scope that is not the requester's own, or a person at a terminal of another login session than the
requester's who types what is shown there and nowhere else. All of it outlives a restart of the daemon.
"""

import asyncio
import hashlib
import time

from atoll import errors
from atoll.core.access import terminal_presence as presence
from atoll.core.access.approved_text import visible
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.challenges import Challenges, Place, place_of_caller
from atoll.core.access.credentials import Doorkeeper, KeyHolder, may
from atoll.core.access.keys import Keys
from atoll.core.access.principals import Principal, new_id
from atoll.core.commands.history import History
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.records import Store
from atoll.core.store.typed import ApprovalRow
from atoll.model import ApprovalInfo

LIFETIME = 300.0
KEEP = 7 * 86400.0
MAX_ACTION = 4096
DESCRIBED = ("command", "write")  # kinds whose text is made of visible lines already
MAX_PENDING = 64  # of one sandbox
UNTIL = {"approved": "was approved already", "rejected": "was rejected already", "used": "was approved and used already",
         "expired": "has expired", "withdrawn": "was withdrawn"}  # fmt: skip


class Approvals(Part):
    def __init__(self, sandboxes: Sandboxes, store: Store, history: History, keys: Keys) -> None:
        self._sandboxes = sandboxes
        self._store = store
        self._history = history
        self._keys = keys
        self._decided: dict[str, asyncio.Event] = {}
        self._challenges = Challenges()

    # Asking

    @verb("approvals.request")
    async def request(
        self, who: Principal, ref: str, action: str, kind: str = "action", sessions: frozenset[int] | None = None
    ) -> ApprovalInfo:
        """A new approval, pending. `sessions` are the login sessions that may not decide it, by default the caller's."""
        if not action.strip() or len(action) > MAX_ACTION or "\0" in action:
            raise errors.InvalidArgument(f"an action is 1 to {MAX_ACTION} characters without NUL")
        return self._request(who, ref, action, kind, sessions)

    def _request(
        self, who: Principal, ref: str, action: str, kind: str, sessions: frozenset[int] | None = None, seal: str = ""
    ) -> ApprovalInfo:
        row = self._sandboxes.known(who, ref)
        if row["state"] in ("ended", "ending"):
            raise errors.FailedPrecondition("the sandbox has ended")
        now = time.time()
        self._store.drop_approvals(now - KEEP)
        if len([a for a in self._store.approvals(row["id"]) if _status(a) == "pending"]) >= MAX_PENDING:
            raise errors.Exhausted(f"{MAX_PENDING} approvals of this sandbox are pending already")
        approval = f"approval-sess-{row['id']}-{new_id(16)}"
        pid = presence.PEER_PID.get() if who.kind == "local" else 0
        if sessions is None:
            sessions = presence.sessions(pid) if pid else frozenset()
        self._store.add_approval(
            {"id": approval, "sandbox_id": row["id"], "owner": who.owner, "kind": kind, "action": action,
             "digest": digest(row["id"], kind, action, seal), "status": "pending", "requested_at": now,
             "expires_at": now + LIFETIME, "sessions": sorted(sessions)}
        )  # fmt: skip
        self._history.record(row["id"], who.owner, "approval", status="pending", approval_id=approval, action=action)
        return self._shown(approval)

    @verb("approvals.wait")
    async def wait(self, who: Principal, approval: str, timeout: float | None = None) -> ApprovalInfo:
        """Block until it is decided; an approved one is used up by this. With a timeout it may still be pending after it.

        A caller that goes away takes the request back.
        """
        return await self._wait(who, approval, timeout)

    async def _wait(self, who: Principal, approval: str, timeout: float | None = None) -> ApprovalInfo:
        row = self._mine(who, approval)
        ends = row["expires_at"] if timeout is None else min(row["expires_at"], time.time() + timeout)
        try:
            while _status(row) == "pending" and time.time() < ends:
                event = self._decided.setdefault(approval, asyncio.Event())
                try:
                    async with asyncio.timeout(max(0.0, ends - time.time())):
                        await event.wait()
                except TimeoutError:
                    pass
                row = self._mine(who, approval)
        except asyncio.CancelledError:
            self._store.move_approval(approval, "pending", status="withdrawn", decided_at=time.time())
            raise
        status = _status(row)
        if status == "approved" and self._store.move_approval(approval, "approved", status="used"):
            return self._shown(approval, "approved")
        if status in ("approved", "used", "withdrawn"):
            raise errors.FailedPrecondition(f"this approval {UNTIL['used' if status == 'approved' else status]}")
        if status == "expired":
            raise errors.Timeout("nobody decided in time", details={"approval_id": approval})
        return self._shown(approval)

    @verb("approvals.get")
    async def get(self, who: Principal, approval: str) -> ApprovalInfo:
        self._visible(who, approval)
        return self._shown(approval)

    @verb("approvals.pending")
    async def pending(self, who: Principal) -> list[ApprovalInfo]:
        """One's own, and for those who may decide, everybody's."""
        owner = None if may(who, "approve") else who.owner
        rows = [row for row in self._store.approvals(None, owner) if _status(row) == "pending"]
        return [self._shown(row["id"]) for row in rows]

    def withdraw_all(self, owner: str) -> None:
        """Take back what an owner has asked for and nobody has decided; whoever waits for it is told."""
        for row in self._store.approvals(None, owner):
            self._store.move_approval(row["id"], "pending", status="withdrawn", decided_at=time.time())
            self._history.record(row["sandbox_id"], owner, "approval", status="withdrawn", approval_id=row["id"])
            if event := self._decided.pop(row["id"], None):
                event.set()

    def withdraw_of_lost_keys(self, keeper: Doorkeeper) -> None:
        """At the start: take back what keys have asked for that were revoked meanwhile, and watch the others."""
        for owner in {row["owner"] for row in self._store.approvals(None)}:
            if not keeper.follow_owner(owner):
                self.withdraw_all(owner)

    # Deciding

    @verb("approvals.challenge")
    async def challenge(self, who: Principal, approval: str) -> dict[str, bool]:
        """Show the action and a number on the caller's own terminal; `decide` wants the number back."""
        row = self._undecided(self._visible(who, approval))
        if isinstance(who, KeyHolder):
            return {"needed": False}
        shown = row["action"].split("\n") if row["kind"] in DESCRIBED else [visible(row["action"])]
        asks = f"sandbox {row['sandbox_id']} asks for approval of this {row['kind']}:\r\n"
        place = self._place(row)
        await asyncio.to_thread(self._challenges.ask, approval, "\r\n    ".join([asks, *shown]), place)
        return {"needed": True}

    @verb("approvals.decide")
    async def decide(
        self, who: Principal, approval: str, approved: bool, reason: str = "", answer: str | None = None
    ) -> ApprovalInfo:
        """The decision. It can be made once; a second one is an error, and so is one that comes too late."""
        row = self._visible(who, approval)
        self._may_decide(who, row, answer)
        row = self._undecided(self._visible(who, approval))
        sandbox = self._store.sandbox(row["sandbox_id"])
        if sandbox is None or sandbox["state"] in ("ended", "ending"):
            raise errors.FailedPrecondition("the sandbox has ended")
        status = "approved" if approved else "rejected"
        moved = self._store.move_approval(
            approval, "pending", status=status, decided_at=time.time(), decided_by=who.owner, reason=reason[:MAX_ACTION]
        )
        if not moved:
            raise errors.FailedPrecondition("somebody else has just decided this")
        self._history.record(
            row["sandbox_id"],
            row["owner"],
            "approval",
            status=status,
            approval_id=approval,
            by=who.owner,
            reason=reason[:500],
        )
        if event := self._decided.pop(approval, None):
            event.set()
        return self._shown(approval)

    # For sandboxes made with --require-approval

    async def require(self, who: Principal, sandbox: str, kind: str, shown: str, seal: str = "") -> None:
        """Ask, wait and use the answer for this very action; PermissionDenied unless it was approved.

        `shown` is all of it in visible lines, `seal` a hash of what is to be done."""
        asked = self._request(who, sandbox, shown, kind, seal=seal)
        try:
            found = await self._wait(who, asked.id)
        except errors.Timeout:
            raise errors.PermissionDenied(
                f"this {kind} needs approval, and nobody decided in time", details={"approval_id": asked.id}
            ) from None
        row = self._store.approval(asked.id)
        if found.status != "approved" or row is None or row["digest"] != digest(sandbox, kind, shown, seal):
            because = f": {found.reason}" if found.reason else ""
            raise errors.PermissionDenied(
                f"this {kind} needs approval, and was rejected{because}", details={"approval_id": asked.id}
            )

    # Inside

    def _may_decide(self, who: Principal, row: ApprovalRow, answer: str | None) -> None:
        if isinstance(who, KeyHolder):
            if not may(who, "approve"):
                raise errors.PermissionDenied("this key may not approve", hint="a key with the scope approve can")
            if who.owner == row["owner"]:
                raise errors.PermissionDenied("nobody approves their own request")
            if row["owner"] in self._keys.makers(who.key_id):
                raise errors.PermissionDenied("this key was made by the one who asks")
            return
        self._challenges.check(row["id"], answer, self._place(row), "run: atoll sandbox approve " + row["id"])

    def _place(self, row: ApprovalRow) -> Place:
        """Where the caller sits, if it can be somebody else than who asked."""
        hint = "run `atoll sandbox approve` in a terminal of your own, or use a key with the scope approve"
        place = place_of_caller("deciding", hint)
        if place[0] & frozenset(row["sessions"]):
            raise errors.PermissionDenied(
                "this is the login session the request came from", hint="decide in another terminal"
            )
        return place

    def _mine(self, who: Principal, approval: str) -> ApprovalRow:
        row = self._store.approval(approval)
        if row is None or row["owner"] != who.owner:
            raise _unknown(approval)
        return row

    def _visible(self, who: Principal, approval: str) -> ApprovalRow:
        row = self._store.approval(approval)
        if row is None or (row["owner"] != who.owner and not may(who, "approve")):
            raise _unknown(approval)
        return row

    def _undecided(self, row: ApprovalRow) -> ApprovalRow:
        if (status := _status(row)) != "pending":
            raise errors.FailedPrecondition(f"this approval {UNTIL[status]}")
        return row

    def _shown(self, approval: str, status: str | None = None) -> ApprovalInfo:
        row = self._store.approval(approval)
        if row is None:
            raise _unknown(approval)
        return ApprovalInfo(
            id=row["id"], sandbox_id=row["sandbox_id"], owner=row["owner"], kind=row["kind"], action=row["action"],
            status=status or _status(row), requested_at=row["requested_at"], expires_at=row["expires_at"],
            decided_at=row["decided_at"], decided_by=row["decided_by"], reason=row["reason"],
        )  # fmt: skip


def digest(sandbox: str, kind: str, action: str, seal: str = "") -> str:
    return _sha(f"{sandbox}\0{kind}\0{action}" + (f"\0{seal}" if seal else ""))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _status(row: ApprovalRow) -> str:
    """As stored, but what nobody decided in time has expired, and what was approved is good for as long again."""
    late = time.time() >= row["expires_at"]
    if late and (
        row["status"] == "pending" or (row["status"] == "approved" and time.time() >= row["expires_at"] + LIFETIME)
    ):
        return "expired"
    return str(row["status"])


def _unknown(approval: str) -> errors.NotFound:
    return errors.NotFound(f"no approval {approval!r:.120}")
