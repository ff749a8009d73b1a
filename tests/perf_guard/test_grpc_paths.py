"""What a call over gRPC and a plain shell command cost, in things that can be counted: tasks, threads, programs."""

import asyncio
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop
from lab import tracing
from lab.plain_backend import plain_core

from atoll import SandboxClient
from atoll.core.access.principals import local
from atoll.model import CreateSandbox, ExecSpec
from atoll.surfaces.k8e.grpc import gateway

ROUNDS = 20
pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The daemon's own kind of loop; gRPC keeps to the kind it saw first."""
    return uvloop.EventLoopPolicy()


class CountedPool(ThreadPoolExecutor):
    submitted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted += 1
        return super().submit(fn, *args, **kwargs)


async def test_a_grpc_exec_takes_few_tasks_and_no_thread() -> None:
    """Today three tasks, all of them gRPC's own: ours runs in the one that gRPC made for the call."""
    loop = asyncio.get_running_loop()
    pool = CountedPool(4)
    loop.set_default_executor(pool)
    async with plain_core() as core:
        served = await gateway.serve(core, _no_application)
        who = local(os.geteuid(), os.getegid())
        made = await core.sandboxes.create(who, CreateSandbox(network=False))
        tasks: Counter[str] = Counter()

        def counted(loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> "asyncio.Task[Any]":
            tasks[getattr(work, "__qualname__", str(work))] += 1
            return asyncio.Task(work, loop=loop, **how)

        client = await asyncio.to_thread(SandboxClient, f"unix:{served.socket}")
        try:
            await asyncio.to_thread(_execs, client, made.id, 3)
            core.store.flush()
            loop.set_task_factory(counted)
            before = pool.submitted
            await asyncio.to_thread(_execs, client, made.id, ROUNDS)
            loop.set_task_factory(None)
            assert pool.submitted - before == 1, "the one that makes the calls"
            assert sum(tasks.values()) <= 3 * ROUNDS + 3, tasks
        finally:
            await asyncio.to_thread(client.close)
            await served.close(0)


@pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="needs strace, and root")
async def test_a_plain_shell_command_is_one_program() -> None:
    """`ls -d /` needs no bash in between; a line that means something to a shell gets one."""
    who = local(os.geteuid(), os.getegid())
    async with plain_core() as core:
        made = await core.sandboxes.create(who, CreateSandbox(network=False))
        agent = core.sandboxes.reach(who, made.id).box.record["pid"]
        shims = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        beside = [word for shim in shims for word in ("-p", shim)]
        with tracing.attached(agent, *beside, "-e", f"trace={tracing.STARTING}") as trace:
            for line in (*["ls -d /"] * 5, "ls -d / | cat"):
                done = await core.commands.exec(who, made.id, ExecSpec(command=line, cwd="/"))
                assert (done.exit_code, done.stdout) == (0, "/\n")
    started = Counter(os.path.basename(program) for program in trace.programs())
    assert started["ls"] >= 3, started
    assert started["bash"] <= 1, started


def _execs(client: SandboxClient, session: str, count: int) -> None:
    for _ in range(count):
        assert client.exec(session, "/bin/true", workdir="/").exit_code == 0


async def _no_application(*_: object) -> None:
    print("sandbox.v1 does not go through the REST application", file=sys.stderr)
