"""The processes that were started through this surface, by their pids inside and their tags."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.model import CommandInfo
from atoll.surfaces.e2b.envd.connect import Fields, RpcError

PREFIX = "e2b"  # begins the ids of their commands
PIPE, TERMINAL, NONE = "stdin", "pty", "none"  # what a process takes
MOST = 1000  # of one sandbox that are remembered, and sandboxes before those that have ended are forgotten


@dataclass
class Begun:
    """One process. `takes`: whether its input is a pipe or a terminal, or it has none; `closed`: its input has ended."""

    command: str
    pid: int
    config: Mapping[str, object]
    tag: str = ""
    takes: str = ""
    closed: bool = False


@dataclass
class _Sandbox:
    by_pid: dict[int, Begun] = field(default_factory=dict)
    by_tag: dict[str, Begun] = field(default_factory=dict)


class Started:
    """Tags and environments of started processes, which core's own records do not have."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._sandboxes: dict[str, _Sandbox] = {}

    def add(self, sandbox: str, begun: Begun) -> None:
        if sandbox not in self._sandboxes and len(self._sandboxes) >= MOST:
            living = {live.id for live in self._core.sandboxes.live.values()}
            self._sandboxes = {name: kept for name, kept in self._sandboxes.items() if name in living}
        kept = self._sandboxes.setdefault(sandbox, _Sandbox())
        kept.by_pid.pop(begun.pid, None)  # a pid that is used again is the newest
        kept.by_pid[begun.pid] = begun
        if begun.tag:
            kept.by_tag[begun.tag] = begun
        while len(kept.by_pid) > MOST:
            oldest = kept.by_pid.pop(next(iter(kept.by_pid)))
            if kept.by_tag.get(oldest.tag) is oldest:
                del kept.by_tag[oldest.tag]

    def forget(self, sandbox: str) -> None:
        self._sandboxes.pop(sandbox, None)

    async def select(self, who: Principal, sandbox: str, selector: Fields | None) -> Begun:
        """Return the process that a selector names, by pid or by tag."""
        pid = selector.whole("pid") if selector is not None else None
        tag = selector.text("tag") if selector is not None else ""
        kept = self._sandboxes.get(sandbox, _Sandbox())
        found = kept.by_pid.get(pid) if pid is not None else kept.by_tag.get(tag)
        if found is not None:
            return found
        if pid is None and not tag:
            raise RpcError("invalid_argument", "a process is named by its pid or its tag")
        for begun in await self._recorded(who, sandbox):
            if begun.pid == pid:
                return begun
        raise RpcError("not_found", f"no process with {f'pid {pid}' if pid is not None else f'tag {tag!r:.80}'}")

    async def _recorded(self, who: Principal, sandbox: str) -> list[Begun]:
        """Return those that core has on record, the newest first: after a restart of the daemon it knows more than we do."""
        return [
            self._begun(who, sandbox, info)
            for info in reversed(await self._core.commands.list(who, sandbox))
            if info.command_id.startswith(PREFIX) and info.pid is not None
        ]

    async def living(self, who: Principal, sandbox: str) -> list[Begun]:
        """Return the processes that run, PTYs too."""
        return [
            self._begun(who, sandbox, info)
            for info in await self._core.commands.list(who, sandbox)
            if info.status == "running" and info.command_id.startswith(PREFIX) and info.pid is not None
        ]

    def _begun(self, who: Principal, sandbox: str, info: CommandInfo) -> Begun:
        """Return what is remembered of a process, else what core's record tells."""
        assert info.pid is not None
        kept = self._sandboxes.get(sandbox, _Sandbox()).by_pid.get(info.pid)
        if kept is not None and kept.command == info.command_id:
            return kept
        live = self._core.sandboxes.live.get((who.owner, sandbox))
        running = live.commands.get(info.command_id) if live is not None else None
        spec = running.spec if running is not None else {}
        takes = TERMINAL if spec.get("pty") else PIPE if spec.get("stdin_stream") else NONE
        return Begun(
            info.command_id, info.pid, {"cmd": info.argv[0] if info.argv else "", "args": info.argv[1:]}, takes=takes
        )
