"""A process inside a sandbox, seen from the daemon: its output as it comes, its stdin, its end.

Reading goes on across a lost channel: the process is found again by its id and read from the offsets reached.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from atoll import errors
from atoll.guest import wire
from atoll.guest.client import GuestClient
from atoll.guest.connection import PROCESS_WINDOW, Bytes, Stream
from atoll.guest.refusals import ConnectionLost
from atoll.guest.wire import Message

CHANNELS = (wire.STDOUT, wire.STDERR)
MAX_RECORDS = 4096  # finished processes the agent remembers


class ProcessRequest(TypedDict, total=False):
    """A process for the agent to start: `argv`, or `shell` with a line for a shell."""

    argv: list[str] | None
    shell: str | None
    cwd: str
    env: dict[str, str] | None
    user: str | None
    umask: int | None
    stdin: bool
    merge_stderr: bool
    pty: Mapping[str, object]
    timeout_ms: int | None


@dataclass(frozen=True)
class Exit:
    """How a process ended, as the agent claims it. `out` and `err` are the bytes it wrote in all."""

    code: int | None
    signal: int | None
    timed_out: bool = False
    cancelled: bool = False
    oom: bool = False
    wall_ms: int = 0
    user_us: int = 0
    sys_us: int = 0
    max_rss_kb: int = 0
    out: int = 0
    err: int = 0
    held: bool = False

    @staticmethod
    def from_wire(result: Message) -> "Exit":
        ended = result.get("exit")
        if not isinstance(ended, dict):
            raise errors.Internal("the guest agent did not say how the process ended")
        return Exit(
            code=_whole(ended, "code", 255),
            signal=_whole(ended, "signal", 255),
            timed_out=ended.get("timed_out") is True,
            cancelled=ended.get("cancelled") is True,
            oom=ended.get("oom") is True,
            wall_ms=_whole(ended, "wall_ms") or 0,
            user_us=_whole(ended, "user_us") or 0,
            sys_us=_whole(ended, "sys_us") or 0,
            max_rss_kb=_whole(ended, "max_rss_kb") or 0,
            out=_whole(result, "out") or 0,
            err=_whole(result, "err") or 0,
            held=result.get("held") is True,
        )


def _whole(fields: Mapping[str, object], key: str, most: int = 2**63 - 1) -> int | None:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= most else None


class Process:
    """One process with this reader. `cancel()` kills it when this started it, and only lets go when it was attached."""

    def __init__(self, client: GuestClient, process_id: str, stream: Stream) -> None:
        self._client = client
        self.id = process_id
        self._stream = stream
        stream.tells_eof = False  # its end is told by the result
        self.pid: int | None = None
        self.offsets = {wire.STDOUT: 0, wire.STDERR: 0}
        self.missed = {wire.STDOUT: 0, wire.STDERR: 0}
        self.exit: Exit | None = None
        self._boot = client.agent.get("boot")
        self._nth = client.started
        self._has_stdin = False
        self._reconnected = False
        self._left = False

    @staticmethod
    async def start(
        client: GuestClient, process_id: str, request: ProcessRequest, sent: Callable[[], None] | None = None
    ) -> "Process":
        """Start it and wait until it runs. A program that cannot be started raises ProgramNotStarted.

        `sent` is called once the request is on its way, before anything of the process is known.
        """
        fields = {"ring": PROCESS_WINDOW, **request}
        client.started += 1
        stream = await client.open("exec", CHANNELS, PROCESS_WINDOW, id=process_id, **fields)
        process = Process(client, process_id, stream)
        process._has_stdin = request.get("stdin") is True or request.get("pty") is not None
        try:
            if sent is not None:
                sent()
            await process._wait_started()
        except BaseException:
            process.leave()
            raise
        return process

    @staticmethod
    async def attach(
        client: GuestClient, process_id: str, *, out: int = 0, err: int = 0, stdin: bool = False
    ) -> "Process":
        """Read a process from offsets (-1: from now on). What the ring has lost is counted in `missed`."""
        stream = await client.open(
            "attach", CHANNELS, PROCESS_WINDOW, id=process_id, out=out, err=err, stdin=stdin or None
        )
        process = Process(client, process_id, stream)
        process.offsets = {wire.STDOUT: max(out, 0), wire.STDERR: max(err, 0)}
        process._has_stdin = stdin
        try:
            await process._wait_attached(count_missed=out >= 0 and err >= 0)
        except ConnectionLost as lost:
            raise client.over or errors.Unavailable(str(lost)) from None
        except BaseException:
            process.leave()
            raise
        return process

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        """Output as (channel, bytes) until the end; then `exit` is set."""
        while True:
            try:
                async for item in self._stream:
                    if item.kind == wire.DATA:
                        self.offsets[item.channel] += len(item.data)
                        yield item.channel, item.data
                    elif item.kind == wire.EVENT:
                        self._told(item.event)
                self.exit = Exit.from_wire(self._stream.result or {})
                return
            except ConnectionLost as lost:
                await self._find_again(lost)

    async def write(self, data: Bytes) -> None:
        """Feed stdin. BrokenPipeError when the process has ended."""
        if self._reconnected:
            raise errors.OutcomeUnknown("the channel broke while stdin was being written")
        try:
            await self._stream.send(data)
        except ConnectionLost as lost:
            raise await self._client.lost("stdin", lost) from None

    def close_stdin(self) -> None:
        self._stream.send_eof()

    def cancel(self) -> None:
        self._stream.cancel()

    def leave(self) -> None:
        """The reader goes away without a word about the process: kill it if it is ours, else let it be."""
        if not self._left:
            self._left = True
            self._stream.cancel()

    async def settle(self) -> Exit | None:
        """After `leave`: wait until the agent has killed it; None if it does not say how it ended."""
        try:
            return Exit.from_wire(await self._stream.finish())
        except (errors.AtollError, ConnectionLost):
            return None

    def _told(self, event: Message) -> None:
        if isinstance(gap := event.get("gap"), dict) and (channel := _whole(gap, "ch", 2)) in self.offsets:
            assert channel is not None
            end = _whole(gap, "to") or 0
            self.missed[channel] += max(0, end - self.offsets[channel])
            self.offsets[channel] = max(end, self.offsets[channel])

    async def _wait_started(self) -> None:
        try:
            async for item in self._stream:
                if item.kind == wire.EVENT and isinstance(started := item.event.get("started"), dict):
                    self.pid = _whole(started, "pid")
                    return
            raise errors.Internal("the guest agent answered `exec` without a start")
        except ConnectionLost as lost:
            await self._find_again(lost)

    async def _wait_attached(self, *, count_missed: bool) -> None:
        async for item in self._stream:
            if item.kind != wire.EVENT or not isinstance(attached := item.event.get("attached"), dict):
                continue
            self.pid = _whole(attached, "pid")
            for channel, key in ((wire.STDOUT, "out"), (wire.STDERR, "err")):
                start = _whole(attached, key)
                if start is None:
                    continue
                if count_missed:
                    self.missed[channel] += max(0, start - self.offsets[channel])
                self.offsets[channel] = start
            return
        raise errors.Internal("the guest agent answered `attach` without its offsets")

    async def _find_again(self, lost: ConnectionLost) -> None:
        """After a lost channel: ask whether it ever started, and read on from where we were."""
        if self._left:
            raise errors.Cancelled("the reader has left")
        self._reconnected = self._has_stdin
        for attempt in (1, 2, 3):
            try:
                self._stream = await self._client.open(
                    "attach",
                    CHANNELS,
                    PROCESS_WINDOW,
                    id=self.id,
                    out=self.offsets[wire.STDOUT],
                    err=self.offsets[wire.STDERR],
                )
                await self._wait_attached(count_missed=True)
                return
            except errors.NotFound as unknown:
                if self._client.over is not None:
                    raise self._client.over from None
                same_agent = self._client.agent.get("boot") == self._boot and "guest_code" not in unknown.details
                if self.pid is None and same_agent and self._client.started - self._nth < MAX_RECORDS:
                    raise errors.Unavailable("the channel broke before the command was started") from None
                raise errors.OutcomeUnknown(f"the agent no longer knows this command: {lost}") from None
            except errors.Unavailable:
                raise await self._client.lost("exec", lost) from None
            except ConnectionLost:
                if attempt == 3:
                    raise await self._client.lost("exec", lost) from None
