"""A sandbox that is alive: its box, the client of its agent, and what goes on in it right now."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from atoll import errors
from atoll.backends.contract import Box
from atoll.core.store.typed import SandboxRow
from atoll.guest import GuestClient
from atoll.model import Blocked, CreateSandbox, HeldLimit, convert

if TYPE_CHECKING:
    from atoll.core.commands.command import Running

REMEMBERED = 32
REMEMBERED_BYTES = 8 * 1024 * 1024
REMEMBERED_REFUSALS = 256
UNCOUNTED = (
    "pty",
    "opens",
    "shell",
    "spawned",
)  # in the record of a command: what is not one of the few in the background

FIRST_LOOK_PAUSE = 1.0


class Live:
    """One living sandbox. Changes of its state hold `changing`; reading and running do not."""

    def __init__(self, row: SandboxRow, box: Box) -> None:
        self.id: str = row["id"]
        self.owner: str = row["owner"]
        self.name: str | None = row["name"]
        self.spec = convert(CreateSandbox, row["spec"])
        self.state: str = row["state"]
        self.created_at: float = row["created_at"]
        self.expires_at: float | None = row["expires_at"]
        self.idle_timeout: float | None = row["idle_timeout"]
        self.last_active: float = row["last_active"]
        self.stored_active = self.last_active
        self.box = box
        self.client = box.client
        self.client.owner = self.owner
        self.changing = asyncio.Lock()
        self.commands: dict[str, Running] = {}
        self._finished: deque[tuple[str, int]] = deque()  # ended commands still in `commands`, and what they hold
        self._finished_bytes = 0
        self.look_again = 0.0  # not before then is it asked again whether a program runs in it while nobody uses it
        self.look_pause = FIRST_LOOK_PAUSE  # doubles each time one was found running
        self.operations = 0  # file transfers, forwards and requests under way
        self.ending: tuple[str, str, str] | None = None  # kind, detail, by: set before it is made to end
        self.watcher: asyncio.Task[None] | None = None
        self.oom_kills = 0
        self.parent_id: str | None = row.get("parent_id")
        self.parent: Live | None = None
        self.children: set[Live] = set()  # sub-agents: while one works, its parent is in use too
        self.callers: frozenset[int] = frozenset()  # login sessions that ran something in it, where rules need to know
        self.blocked: deque[tuple[float, Blocked]] = deque(maxlen=REMEMBERED_REFUSALS)

    def row(self) -> SandboxRow:
        """Its record from what is known without the store; enough to end it and to tell of that."""
        facts = self.box.facts
        limits: dict[str, HeldLimit] = {
            key: {"value": value, "enforced": facts.enforced.get(key, False)}
            for key, value in facts.limits.to_json().items()
        }
        return {
            "id": self.id, "owner": self.owner, "name": self.name, "state": self.state, "parent_id": self.parent_id,
            "runtime": facts.runtime, "image": self.spec.image,
            "spec": msgspec.to_builtins(self.spec), "record": {"box": self.box.record, "limits": limits},
            "created_at": self.created_at, "expires_at": self.expires_at, "idle_timeout": self.idle_timeout,
            "last_active": self.last_active, "ended_at": None, "end_kind": None, "end_detail": None, "end_by": None,
            "request_id": None, "request_hash": None,
        }  # fmt: skip

    @property
    def busy(self) -> bool:
        working = self.operations > 0 or any(not c.ended and "opens" not in c.spec for c in self.commands.values())
        return working or any(child.busy for child in self.children)

    @property
    def background_runs(self) -> int:
        return sum(
            1
            for command in self.commands.values()
            if command.background and not command.ended and not any(map(command.spec.get, UNCOUNTED))
        )

    @property
    def terminals(self) -> int:
        """Those that run, in the background or not."""
        return sum(1 for command in self.commands.values() if not command.ended and command.spec.get("pty"))

    def finished(self, command: "Running") -> None:
        """Keep the newest ended commands with their output, up to a number and a size."""
        size = 0 if command.background else sum(kept.size for kept in command.output.kept.values())
        self._finished.append((command.id, size))
        self._finished_bytes += size
        while len(self._finished) > REMEMBERED or self._finished_bytes > REMEMBERED_BYTES:
            self.forget_oldest()

    def forget_oldest(self) -> bool:
        """Forget the output of the command that ended longest ago; False when none is remembered."""
        if not self._finished:
            return False
        oldest, size = self._finished.popleft()
        self._finished_bytes -= size
        if (command := self.commands.pop(oldest, None)) is not None:
            command.output.forget()
        return True

    def refused_since(self, start: float) -> list[Blocked]:
        """Return what the network policy refused since then, without repeats."""
        found: list[Blocked] = []
        for at, told in self.blocked:
            if at >= start and told not in found:
                found.append(told)
        return found

    def touch(self) -> None:
        self.last_active = time.time()
        if self.parent is not None:
            self.parent.last_active = self.last_active

    @contextmanager
    def use(self) -> Iterator[GuestClient]:
        """The agent's client for one operation; while it is in use the sandbox is not idle."""
        if self.state != "running":
            raise self.not_running()
        self.operations += 1
        try:
            yield self.client
        finally:
            self.operations -= 1
            self.touch()

    def not_running(self) -> errors.AtollError:
        if self.state == "paused":
            return errors.FailedPrecondition("the sandbox is paused", hint="resume it first")
        if self.state == "stopped":
            return errors.FailedPrecondition("the sandbox is stopped", hint="start it first")
        if self.state in ("ending", "ended"):
            return gone(self.id, *(self.ending or ("lost", "", "")))
        return errors.FailedPrecondition(f"the sandbox is {self.state}")


def host_name(sandbox: str, name: str | None = None) -> str:
    """Return a sandbox's host name."""
    return name or f"sandbox-{sandbox[:12]}"


def gone(sandbox: str, kind: str, detail: str, by: str) -> errors.SandboxGone:
    """The one sentence about how a sandbox ended."""
    words = {
        "destroyed": "was destroyed",
        "idle": "was ended because nobody used it",
        "expired": "reached the end of its lifetime",
        "oom": "ran out of memory",
        "crashed": "crashed",
        "stopped": "was stopped",
        "lost": "was lost",
        "failed": "could not be started",
        "evicted": "was removed to make room for newer ones",
    }
    text = f"the sandbox {words.get(kind, 'has ended')}" + (f" ({detail})" if detail else "")
    return errors.SandboxGone(text, details={"sandbox_id": sandbox, "reason": kind, "detail": detail, "by": by})
