"""What the hot paths cost, in things that can be counted: processes, system calls, statements, messages, bytes.

Each ceiling is a little above today's figure. A test that fails here says that something came to be done twice, or for nothing;
if it has to be so, raise the ceiling in the same change and say why.
"""

import itertools
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from lab import tracing
from lab.plain_backend import plain_core
from lab.sandboxes import Lab

import atoll
from atoll.backends.local.kernel.disks import Disks
from atoll.core.access.principals import local
from atoll.core.store.records import Store
from atoll.core.store.sqlite import SqliteDatabase
from atoll.guest import connection
from atoll.model import CreateSandbox, ExecSpec

ROUNDS = 20
traced = pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="needs strace, and root")


@traced
def test_system_calls_of_the_daemon_for_one_exec(lab: Lab, sandbox: atoll.Sandbox) -> None:
    """Today 29: five writes (agent, answer, transcript, audit before and after), the rest is the store's log."""
    for _ in range(5):
        sandbox.exec(["/bin/true"])
    with tracing.attached(lab.start()) as trace:
        for _ in range(ROUNDS):
            assert sandbox.exec(["/bin/true"]).exit_code == 0
    made = trace.working()
    assert made["write"] <= 5 * ROUNDS + 5, made
    assert made["read"] <= 5 * ROUNDS, made
    assert sum(made.values()) <= 40 * ROUNDS, made
    assert trace.processes() == 0, "the daemon starts no process for an exec"


def test_an_exec_is_two_processes_inside(sandbox: atoll.Sandbox) -> None:
    """The command and a spare for the next one. Numbers of processes count up, so they tell."""
    own = [int(sandbox.exec(["/bin/sh", "-c", "echo $$"]).stdout) for _ in range(6)]
    assert min(after - before for before, after in itertools.pairwise(own)) <= 2, own


@traced
def test_programs_and_processes_of_a_cold_create(lab: Lab) -> None:
    """Launcher, engine, the engine's own second start (twice), agent: nothing else is started."""
    if why := lab.works("container"):
        pytest.skip(why)
    with lab.sandbox(runtime="container", network=False):
        pass  # whatever only the first create of a daemon does
    with tracing.attached(lab.start(), "-e", f"trace={tracing.STARTING}") as trace:
        made = lab.create(runtime="container", network=False)
    try:
        programs = trace.programs()
        assert len(programs) <= 5, programs
        assert trace.processes() <= 8, trace.calls
    finally:
        made.destroy()


@traced
def test_a_call_of_the_command_line_is_one_process(lab: Lab, sandbox: atoll.Sandbox) -> None:
    argv = tracing.python("-m", "atoll", "sandbox", "run", "echo hi", "--lang", "bash", "--session-id", sandbox.id)
    trace = tracing.run(argv, lab.env, "-e", f"trace={tracing.STARTING},socket,connect")
    assert len(trace.programs()) == 1, trace.programs()
    assert trace.processes() == 0, trace.calls
    assert len(trace.of("connect")) == 1, trace.of("connect")


async def test_one_message_and_few_statements_per_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request to the agent; two statements before the answer, four in one transaction after it."""
    who = local(os.geteuid(), os.getegid())
    async with plain_core() as core:
        made = await core.sandboxes.create(who, CreateSandbox(network=False))
        spec = [ExecSpec(argv=["/bin/true"], cwd="/", id=f"count-{number}") for number in range(3)]
        await core.commands.exec(who, made.id, spec[0])
        core.store.flush()
        asked: Counter[str] = Counter()
        opened = connection.Connection.open

        def counted(self: connection.Connection, request: dict[str, object], *rest: int) -> connection.Stream:
            asked[str(request["op"])] += 1
            return opened(self, request, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(connection.Connection, "open", counted)
        statements: list[str] = []
        core.store._db.connection.set_trace_callback(statements.append)
        result = await core.commands.exec(who, made.id, spec[1])
        before = list(statements)
        core.store.flush()
        core.store._db.connection.set_trace_callback(None)
        assert result.exit_code == 0
        assert asked == {"exec": 1}
        assert len(statements) <= 6, statements
        late = ("BEGIN", "UPDATE command", "INSERT INTO event", "COMMIT")
        assert len([one for one in before if not one.startswith(late)]) <= 2, before


async def test_a_late_write_is_not_waited_for_by_the_next_exec() -> None:
    """The record of how a command ended is written after its answer; a caller that comes back at once does not pay for it."""
    who = local(os.geteuid(), os.getegid())
    async with plain_core() as core:
        made = await core.sandboxes.create(who, CreateSandbox(network=False))
        live = core.sandboxes.reach(who, made.id)
        core.store.flush()
        core.store.later(lambda: None)
        statements: list[str] = []
        core.store._db.connection.set_trace_callback(statements.append)
        assert core.commands.starter.repeated(live, ExecSpec(argv=["/bin/true"], id="never-seen")) is None
        core.store._db.connection.set_trace_callback(None)
        assert len(statements) == 1, statements


async def test_a_list_is_one_statement_and_decodes_a_policy_once() -> None:
    """However many sandboxes there are: what they have in common is decoded for the first and shared by the others."""
    who = local(os.geteuid(), os.getegid())
    async with plain_core() as core:
        for number in range(4):
            await core.sandboxes.create(who, CreateSandbox(name=f"n{number}", network=False))
        statements: list[str] = []
        core.store._db.connection.set_trace_callback(statements.append)
        found = await core.sandboxes.list(who)
        core.store._db.connection.set_trace_callback(None)
        assert [info.name for info in found] == ["n0", "n1", "n2", "n3"]
        assert len(statements) == 1, statements
        assert all(info.policy is found[0].policy and info.limits is found[0].limits for info in found)
        for info in found:
            one = await core.sandboxes.get(who, info.id)
            assert (info.policy, info.limits, info.labels) == (one.policy, one.limits, one.labels)


async def test_a_fresh_disk_is_small(tmp_path: Path) -> None:
    """Of the default size: it is copied at every create, and a thousand sandboxes have a thousand of them."""
    if os.geteuid() != 0 and shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    disk = tmp_path / "disk.img"
    await Disks(tmp_path).create(disk, 4096)
    stat = disk.stat()
    assert stat.st_size == 4096 << 20
    assert stat.st_blocks * 512 <= 1 << 20


@pytest.mark.parametrize("ask", ["id", "name", "alias", "nobody", "children"])
def test_finding_a_sandbox_does_not_look_at_the_others(tmp_path: Path, ask: str) -> None:
    """Steps of SQLite's machine, with few and with many sandboxes in the store."""
    took = []
    for count in (10, 1000):
        store = Store(SqliteDatabase(tmp_path / f"{count}.db"))
        for number in range(count):
            row = {
                **{"id": f"id{number}", "owner": "me", "name": f"name{number}", "state": "running", "runtime": "r"},
                **{"image": "host", "spec": {}, "record": {}, "created_at": 0.0, "last_active": 0.0},
            }
            store.add_sandbox(row, [f"alias{number}"], limit=5000)
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        store._db.connection.set_progress_handler(step, 1)
        found = store.children("id7") if ask == "children" else store.find_sandbox("me", f"{ask}7")
        store._db.connection.set_progress_handler(None, 1)
        assert bool(found) == (ask in ("id", "name", "alias"))
        store.close()
        took.append(steps)
    assert took[1] <= took[0] + 10, took
