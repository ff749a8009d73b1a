"""The daemon's handle on egress: one router, one broker, and a link with a policy for each sandbox.

Order is what keeps this closed. A link is plugged with its router end down; the broker learns the policy; only then is
the end raised. When the broker dies every grant is flushed before the next one starts, and while none runs nothing
passes. When the daemon dies the broker keeps the router alive, and `start` with `readopt` takes both over.
"""

import asyncio
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

from atoll.egress.broker.sandbox import Counters, EgressEvent
from atoll.egress.control import broker_process, wire
from atoll.egress.control.line import ORDER_SECONDS, BrokerLine
from atoll.egress.limits import Limits
from atoll.egress.policy import EgressPolicy
from atoll.egress.refusals import Refusals
from atoll.egress.router.nft import Entry, read_entries
from atoll.egress.router.router import BATCH, Link, LinkSockets, Router
from atoll.errors import AtollError, Internal, NotFound, Unavailable

_SWEEP_SECONDS: Final = 0.25
_STOP_SECONDS: Final = 5.0
_START_SECONDS: Final = 180.0  # for a new broker on a slow machine; one that dies while it starts is told at once
_log = logging.getLogger(__name__)
_T = TypeVar("_T")

OnEvent = Callable[[EgressEvent], None]
OnAsk = Callable[[str, str, int], Awaitable[str]]  # sandbox, name, port; why not, or nothing


@dataclass(slots=True)
class _Attached:
    link: Link
    policy: EgressPolicy | None = None
    up: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Kept:
    """A sandbox that outlived a daemon; `netns_fd` is needed when the router did not."""

    sandbox: str
    link: Link
    policy: EgressPolicy | None
    netns_fd: int | None = None


def batched(entries: list[Entry]) -> Iterator[list[Entry]]:
    """The entries in parts that the router does in one short step."""
    return (entries[at : at + BATCH] for at in range(0, len(entries), BATCH))


class Egress:
    """Use `await Egress.start(...)`."""

    _routers: type[Router] = Router

    def __init__(
        self, state_dir: Path, broker_uid: int | None, on_event: OnEvent | None, on_ask: OnAsk | None = None
    ) -> None:
        self._dir = state_dir
        self._uid = broker_uid
        self._on_event = on_event
        self._on_ask = on_ask
        self._host_net: int | None = None
        self._servers: tuple[tuple[str, int], ...] = ()
        self._hosts_file = "/etc/hosts"
        self._limits = Limits()
        self._links: dict[str, _Attached] = {}
        self._refusals = Refusals()
        self._router_thread = ThreadPoolExecutor(1, "atoll-router")
        self._sweep_thread = ThreadPoolExecutor(1, "atoll-sweep")
        self._router: Router
        self._process: subprocess.Popen[bytes] | None = None
        self._line: BrokerLine | None = None
        self._ready = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answering: set[asyncio.Task[Any]] = set()
        self._sweeping = False
        self._closing = False
        self.broker_pid = 0
        self.adopted = False

    @classmethod
    async def start(
        cls,
        state_dir: str | Path,
        broker_uid: int | None = None,
        on_event: OnEvent | None = None,
        on_ask: OnAsk | None = None,
        *,
        host_net: int | None = None,
        servers: Iterable[tuple[str, int]] = (),
        hosts_file: str = "/etc/hosts",
        limits: Limits | None = None,
    ) -> Self:
        """Take over a living broker of this state directory, or make a router and start one.

        `broker_uid` is the unprivileged id it runs as (None keeps ours, without capabilities: rootless). `host_net` is a
        descriptor of the namespace it dials from, by default ours; `servers` replaces the machine's name servers.
        `limits` says how much the broker may hold. `on_ask` is called for connections that a policy holds; without it they are refused.
        """
        self = cls(Path(state_dir), broker_uid, on_event, on_ask)
        self._host_net = None if host_net is None else os.dup(host_net)
        self._servers, self._hosts_file = tuple(servers), hosts_file
        self._limits = limits or Limits()
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            found = await self._adopt()
            if found is None:
                self._router = await self._in_router(self._routers.create)
                found = await self._spawn()
            self._line = await BrokerLine.open(found.connection, found.handover, self._hear)
            self._line.holds.update((await self._line.order({"op": "list"}))["sandboxes"].values())
            await self._line.order({"op": "open"})
            self._ready.set()
        except BaseException:
            await self.close()
            raise
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        return self

    async def attach(self, sandbox: str, netns_fd: int, policy: EgressPolicy | None) -> Link:
        """Join a sandbox's network namespace; without a policy the link stays down until `update` brings one."""
        await self.detach(sandbox)
        link = await self._in_router(self._router.plug, sandbox, netns_fd)
        self._links[sandbox] = _Attached(link)
        if policy is not None:
            try:
                await self.update(sandbox, policy)
            except BaseException:
                await self.detach(sandbox)
                raise
        return link

    async def update(self, sandbox: str, policy: EgressPolicy) -> None:
        """Put a policy in force; on return nothing it does not allow is open any more."""
        attached = self._links.get(sandbox)
        if attached is None:
            raise NotFound(f"no network link for sandbox {sandbox}")
        attached.policy = policy
        await self._put_in_force(attached, policy)

    async def detach(self, sandbox: str) -> Counters:
        """Take a sandbox off the network for good; its last counters. Idempotent."""
        attached = self._links.pop(sandbox, None)
        if attached is None:
            return {}
        await self._in_router(self._router.unplug, attached.link)
        self._sweep_soon()
        if attached.policy is None:
            return {}
        try:
            answer = await self._order({"op": "unregister", "sandbox": sandbox})
            if self._line is not None:
                self._line.holds.discard(attached.link.ifname)
            return cast("Counters", answer.get("counters", {}))
        except Unavailable:
            return {}  # a broker that starts later never learns of this sandbox

    async def readopt(self, kept: Iterable[Kept]) -> dict[str, Link]:
        """After a daemon's restart: the links of living sandboxes, made anew where needed; others are removed.

        A sandbox that is missing in the result has no network and cannot get one: end it.
        """
        links: dict[str, Link] = {}
        wanted = list(kept)
        for one in wanted:
            link: Link | None = one.link
            if not await self._in_router(self._router.known, one.link):
                await self._order({"op": "unregister", "sandbox": one.sandbox})  # frees the address
                link = await self._replug(one)
            if link is None:
                continue
            links[one.sandbox] = link
            attached = self._links[one.sandbox] = _Attached(link, one.policy)
            if one.policy is not None:
                await self._put_in_force(attached, one.policy)
        await self._in_router(self._router.forget_others, tuple(links.values()))
        self._sweep_soon()
        for sandbox in (await self._order({"op": "list"})).get("sandboxes", []):
            if sandbox not in links:
                await self._order({"op": "unregister", "sandbox": sandbox})
        return links

    def link(self, sandbox: str) -> Link | None:
        attached = self._links.get(sandbox)
        return attached.link if attached else None

    def events(self, sandbox: str) -> list[EgressEvent]:
        """The latest refusals of a sandbox, oldest first; also for a while after it is gone."""
        return self._refusals.of(sandbox)

    async def counters(self, sandbox: str) -> Counters:
        """Per host: connections, bytes sent and received; and in all: refusals, open connections, last payload time."""
        answer = await self._order({"op": "counters", "sandbox": sandbox})
        return cast("Counters", answer.get("counters", {}))

    async def close(self, *, keep_broker: bool = False) -> None:
        """Let go. The broker ends, and with it every sandbox's network, unless it is kept for the next daemon."""
        self._closing = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._line is not None:
            if not keep_broker:
                try:
                    await self._line.order({"op": "stop"}, _STOP_SECONDS)
                except (Unavailable, Internal) as err:
                    _log.debug("stopping the broker: %s", err)
            await self._line.close()
        if not keep_broker:
            await self._end_process()
        for task in self._answering:
            task.cancel()  # who waits for a person is told no by the broker, which has no daemon then
        await asyncio.gather(*self._tasks, *self._answering, return_exceptions=True)
        if hasattr(self, "_router"):
            await self._in_router(self._router.close)
        self._router_thread.shutdown(wait=False)
        self._sweep_thread.shutdown(wait=False)
        if self._host_net is not None:
            os.close(self._host_net)
            self._host_net = None

    # The router

    async def _in_router(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._router_thread, work, *args)

    async def _replug(self, one: Kept) -> Link | None:
        if one.netns_fd is None or one.link.is_tap:
            return None
        for _ in range(100):
            try:
                return await self._in_router(self._plug_again, one)
            except FileExistsError:
                await asyncio.sleep(0.1)  # the old link goes with the old router, a moment later
            except OSError as err:
                _log.warning("sandbox %s cannot be connected again: %s", one.sandbox, err)
                return None
        return None

    def _plug_again(self, one: Kept) -> Link:
        assert one.netns_fd is not None
        return self._router.plug(one.sandbox, one.netns_fd, address=one.link.gateway)

    async def _put_in_force(self, attached: _Attached, policy: EgressPolicy) -> None:
        order = {"op": "register", "link": attached.link.to_dict(), "policy": policy.to_dict()}
        async with attached.lock:
            line = await self._hand_over(attached.link)
            try:
                answer = await line.order(order)
            except Internal:
                line.holds.discard(attached.link.ifname)
                raise
            # In small steps: others need the router's thread meanwhile.
            for rows in batched(read_entries(answer["revoke"])):
                await self._in_router(self._router.revoke, attached.link, rows)
            for rows in batched(read_entries(answer["grant"])):
                await self._in_router(self._router.grant, attached.link, rows)
            await self._in_router(self._settle, attached, policy)

    async def _hand_over(self, link: Link) -> BrokerLine:
        """Open the sockets of a link and give them to the broker, unless it has them; the line to it. No copy stays here."""
        line = await self._living_line()
        if link.ifname in line.holds:
            return line
        try:
            sockets = await self._in_router(LinkSockets.open, link)
        except OSError as err:
            raise Unavailable(f"the network link of {link.sandbox} cannot be opened: {err}") from err
        try:
            line.hand_over(link, sockets)
        finally:
            sockets.close()
        return line

    def _settle(self, attached: _Attached, policy: EgressPolicy) -> None:
        link = attached.link
        self._router.set_host_ports(link, policy.host_ports)
        if not attached.up:
            self._router.open_link(link)
            attached.up = True

    def _sweep_soon(self) -> None:
        if self._sweeping:
            return
        self._sweeping = True
        self._spawn_task(self._sweep(), self._tasks)

    async def _sweep(self) -> None:
        await asyncio.sleep(_SWEEP_SECONDS)
        self._sweeping = False
        try:
            while await self._in_router(self._router.clear_stale):
                pass
            await asyncio.get_running_loop().run_in_executor(self._sweep_thread, self._router.sweep)
        except (OSError, Internal) as err:
            _log.warning("unplugged interfaces were left behind: %s", err)

    def _spawn_task(self, work: Any, among: set[asyncio.Task[Any]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)

    # The broker

    async def _adopt(self) -> broker_process.Found | None:
        """A broker that is already there, with its router taken over; None when there is none."""
        try:
            found = await asyncio.to_thread(broker_process.connect, self._dir)
        except TimeoutError:
            # It is there and hangs, and with it hang the links of its sandboxes: only its end sets them free.
            await asyncio.to_thread(broker_process.end_hung, self._dir, self._uid)
            return None
        except (OSError, Unavailable):
            return None
        self._router = await self._in_router(self._routers.adopt, found.sockets)
        self.adopted, self.broker_pid = True, found.pid
        if found.speaks_our_version:
            return found
        found.connection.close()
        await self._end_process()
        await self._in_router(self._router.flush_grants)
        return await self._spawn()

    async def _spawn(self) -> broker_process.Found:
        def start() -> "subprocess.Popen[bytes]":
            return broker_process.spawn(
                self._dir,
                self._router.sockets,
                uid=self._uid,
                host_net=self._host_net,
                servers=self._servers,
                hosts_file=self._hosts_file,
                limits=self._limits,
            )

        # Not on the router's thread: a child is born in the namespace of the thread that starts it.
        self._process = await asyncio.to_thread(start)
        found = await asyncio.to_thread(broker_process.connect, self._dir, _START_SECONDS)
        found.sockets.close()  # copies of our own
        self.broker_pid = found.pid
        return found

    async def _supervise(self) -> None:
        """Whenever the broker is gone, close all doors and start another."""
        while True:
            assert self._line is not None
            await self._line.gone.wait()
            if self._closing:
                return
            self._ready.clear()
            _log.warning("the egress broker is gone; starting another")
            await self._line.close()
            await self._restart()

    async def _restart(self) -> None:
        delay = 0.05
        while True:
            try:
                await self._in_router(self._router.flush_grants)
                await self._end_process()
                found = await self._spawn()
                self._line = await BrokerLine.open(found.connection, found.handover, self._hear)
                break
            except (OSError, Unavailable, Internal, subprocess.SubprocessError) as err:
                _log.error("the egress broker does not start: %s", err)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)
        self._ready.set()
        for attached in list(self._links.values()):
            try:
                if attached.policy is not None:
                    await self._put_in_force(attached, attached.policy)
            except (Unavailable, Internal) as err:
                _log.error("sandbox %s is without network: %s", attached.link.sandbox, err)
        try:
            await self._line.order({"op": "open"})
        except (Unavailable, Internal) as err:
            _log.error("the egress broker does not open: %s", err)
            await self._line.close()  # sets `gone`, so that the supervisor starts over

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            if self.broker_pid and self.adopted:
                await asyncio.to_thread(broker_process.end_stranger, self.broker_pid, self._uid)
            return
        try:
            await asyncio.to_thread(process.wait, 2)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _hear(self, line: BrokerLine, message: wire.Message) -> None:
        if message.get("op") in ("grant", "ask"):
            self._spawn_task(self._answer(line, message), self._answering)
        elif message.get("op") == "event":
            self._keep_event(EgressEvent.from_dict(message["event"]))
        elif message.get("op") == "crowd":
            crowd = message.get("there") is True
            if self._process is not None:
                broker_process.prefer(self._process.pid, crowd=crowd)
            else:
                broker_process.prefer_stranger(self.broker_pid, self._uid, crowd=crowd)

    async def _answer(self, line: BrokerLine, message: wire.Message) -> None:
        """Answer a question of the broker, to the broker that asked: the next one counts its questions anew."""
        answer: wire.Message = {"ok": False}
        attached = self._links.get(str(message.get("sandbox")))
        try:
            if attached is not None and message["op"] == "grant":
                for rows in batched(read_entries(message["entries"])):
                    await self._in_router(self._router.grant, attached.link, rows)
                answer = {"ok": attached is self._links.get(attached.link.sandbox)}
            elif attached is not None and self._on_ask is not None:
                why = await self._on_ask(attached.link.sandbox, str(message["name"]), int(message["port"]))
                answer = {"ok": not why, "why": why}
        except (AtollError, ValueError, TypeError) as err:
            _log.error("%s: %s", message["op"], err)
        line.tell({"op": "answer", "q": message["q"], **answer})

    def _keep_event(self, event: EgressEvent) -> None:
        self._refusals.keep(event, len(self._links))
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                _log.exception("an event listener failed")

    async def _order(self, message: wire.Message) -> wire.Message:
        """Give the broker an order; waits a while for one that is just being started."""
        return await (await self._living_line()).order(message)

    async def _living_line(self) -> BrokerLine:
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                await self._ready.wait()
        except TimeoutError:
            raise Unavailable("there is no egress broker") from None
        assert self._line is not None
        return self._line
