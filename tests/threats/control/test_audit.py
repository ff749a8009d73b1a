"""CTL-16: what changes something is in the log before it happens, however it ends; and the log shows when it was touched."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from atoll import errors
from atoll.core import Core
from atoll.core.access.audit import Audit, verify
from atoll.core.access.principals import local
from atoll.model import ChangeHosts, CreateSandbox, ExecSpec, Extend, MakeDirectory, StatFile

ME = local(os.geteuid(), os.getegid())


def records(core: Core) -> list[dict[str, Any]]:
    return list(core.audit.read())


async def test_every_changing_verb_leaves_a_beginning_and_an_end(core: Core) -> None:
    sandbox = (await core.sandboxes.create(ME, CreateSandbox(env={"TOKEN": "canary-value"}))).id
    await core.commands.exec(ME, sandbox, ExecSpec(command="exit 3", cwd="/tmp", env={"KEY": "canary-value"}))
    async for _ in core.commands.stream(ME, sandbox, ExecSpec(argv=["true"], cwd="/tmp")):
        pass
    await core.commands.background(ME, sandbox, ExecSpec(command="true", cwd="/tmp", background=True))
    path = str(core.home / "boxes" / "made-by-test")
    await core.files.ask(ME, sandbox, "mkdir", MakeDirectory(path=path, parents=True))
    await core.files.ask(ME, sandbox, "stat", StatFile(path=path))
    await core.files.write(ME, sandbox, f"{path}/f", b"canary-value")
    await core.sandboxes.extend(ME, sandbox, Extend(lifetime_s=100))
    await core.secrets.set(ME, "name", "key", "canary-value")
    await core.approvals.request(ME, sandbox, "something")
    with pytest.raises(errors.AtollError):
        await core.hosts.change(ME, sandbox, ChangeHosts(add=["example.com"]))
    with pytest.raises(errors.NotFound):
        await core.snapshots.delete(ME, "none")
    await core.sandboxes.destroy(ME, sandbox)
    found = records(core)
    begun = {record["seq"]: record["action"] for record in found if record["result"] == "begun"}
    ended = {record["of"]: record for record in found if record["result"] != "begun"}
    assert set(begun) == set(ended)
    assert sorted(begun.values()) == sorted(
        ["create", "commands.exec", "commands.stream", "commands.background", "files.mkdir", "files.write", "extend",
         "secrets.set", "approvals.request", "hosts.change", "snapshots.delete", "destroy"]
    )  # fmt: skip
    results = {ended[seq]["action"]: ended[seq] for seq in begun}
    assert results["commands.exec"]["details"] == {"exit_code": 3}
    assert results["snapshots.delete"]["result"] == "not_found"
    assert results["create"]["sandbox"] == sandbox
    assert all(record["who"] == ME.owner for record in found)
    assert "canary-value" not in str(found), "no value of the environment, of a file or of a secret"
    assert core.audit.verify().ok


async def test_what_cannot_be_written_down_is_not_done_unless_it_ends_something(core: Core) -> None:
    """Without a log nothing is begun. A destroy is done all the same; its answer says so, and its record comes later."""
    sandbox = (await core.sandboxes.create(ME, CreateSandbox())).id
    real, full = core.audit._fd, os.open("/dev/full", os.O_WRONLY)
    core.audit._fd = full
    try:
        with pytest.raises(errors.DiskFull):
            await core.commands.exec(ME, sandbox, ExecSpec(command="true", cwd="/tmp"))
        ended = await core.sandboxes.destroy(ME, sandbox)
    finally:
        core.audit._fd = real
        os.close(full)
    assert ended.state == "ended" and ended.unrecorded == ["audit"]
    core.audit.settle()
    last = records(core)[-1]
    assert (last["action"], last["sandbox"], last["result"]) == ("destroy", sandbox, "ok") and last["details"]["late"]
    assert core.audit.verify().ok


async def test_callers_cannot_forge_records(core: Core) -> None:
    sandbox = (await core.sandboxes.create(ME, CreateSandbox())).id
    before = len(records(core))
    evil = 'true #\n{"hash":"0","record":{"seq":1,"who":"root"}}\n\u2028'
    await core.commands.exec(ME, sandbox, ExecSpec(command=evil, cwd="/tmp"))
    assert len(records(core)) == before + 2
    assert core.audit.verify().ok


def test_a_log_cut_while_no_daemon_ran_stays_visible(tmp_path: Path) -> None:
    log = Audit(tmp_path)
    for number in range(5):
        log.record("uid:0", "exec", f"box{number}")
    log.close()
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    log = Audit(tmp_path)  # the next daemon goes on writing, and cannot hide it
    log.record("uid:0", "exec", "later")
    log.close()
    verdict = verify(tmp_path)
    assert not verdict.ok and "lost" in verdict.problem


def test_a_full_disk_leaves_no_half_record(tmp_path: Path) -> None:
    """A record that does not fit is refused whole; the next one continues the chain."""
    log = Audit(tmp_path)
    log.record("a", "one")
    size = (tmp_path / "audit.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, hard))  # the kernel takes the first 40 bytes of the next
    try:
        with pytest.raises(OSError):
            log.record("a", "two")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "audit.jsonl").stat().st_size == size
    log.record("a", "three")
    log.close()
    assert verify(tmp_path) == (True, 2, "")
    assert [record["action"] for record in Audit(tmp_path).read()] == ["one", "three"]
