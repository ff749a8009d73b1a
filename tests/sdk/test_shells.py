"""Shell sessions through both faces of the SDK, on every runtime."""

import asyncio

import pytest
from lab.sandboxes import Lab

from atoll import AsyncSandbox, Output, Sandbox, errors


def test_everyday_30_a_session_keeps_its_state_and_says_when_it_ended(anywhere: Sandbox) -> None:
    with anywhere.shell() as shell:
        assert shell.run("cd /tmp && export A=1").ok
        assert shell.run("pwd; echo $A").stdout == "/tmp\n1\n"
        assert shell.run("cat", stdin=b"\xff\x00").raw_stdout == b"\xff\x00"
        pieces = [item for item in shell.stream("echo a; echo b >&2") if isinstance(item, Output)]
        assert {(piece.stream, piece.data) for piece in pieces} == {("stdout", b"a\n"), ("stderr", b"b\n")}
        assert [found.id for found in anywhere.shells()] == [shell.id]
        assert shell.run("exit 5").exit_code == 5 and shell.ended
        with pytest.raises(errors.NotFound):
            shell.run("true")
    assert anywhere.shells() == []


def test_the_asyncio_face_interrupts(lab: Lab, runtime: str) -> None:
    async def talk() -> tuple[int | None, str]:
        async with AsyncSandbox(home=str(lab.home), runtime=runtime) as sandbox, await sandbox.shell() as shell:
            running = asyncio.create_task(shell.run("a=1; touch /tmp/begun; sleep 4949", timeout=None))
            while not (await sandbox.exec(["test", "-e", "/tmp/begun"])).ok:
                await asyncio.sleep(0.05)
            await shell.interrupt()
            return (await running).exit_code, (await shell.run("echo $a")).stdout

    assert asyncio.run(talk()) == (130, "1\n")
