"""What a program with the published Python client does; run by itself, because this directory has the client's name."""

import asyncio
import os
import sys

import agentkernel

URL, KEY, WAIT = os.environ["URL"], os.environ["KEY"], 240.0


def expect(error: type[Exception], call: object, *words: object) -> None:
    try:
        call(*words)  # type: ignore[operator]
    except error:
        return
    raise AssertionError(f"{error.__name__} was expected")


def main(name: str) -> None:
    with agentkernel.AgentKernel(base_url=URL, api_key=KEY, timeout=WAIT) as client:
        assert client.health() == "ok"
        assert client.run(["python3", "-c", "print('hi')"]).output == "hi\n"
        expect(agentkernel.ServerError, client.run, ["false"])  # line 26: a failure is one
        (failed,) = client.batch_run([["sh", "-c", "echo x; exit 3"]]).results
        assert failed.error == "Command exited with code 3: x\n", failed
        assert client.run(["sh", "-c", "echo x"], profile="restrictive").output == "x\n"
        events = list(client.run_stream(["sh", "-c", "echo streamed"]))
        assert [event.data["data"] for event in events if event.type == "output"] == ["streamed\n"]
        assert events[0].type == "started" and events[-1].type == "done"
        assert [result.output for result in client.batch_run([["echo", "a"], ["echo", "b"]]).results] == ["a\n", "b\n"]
        with client.sandbox(name, memory_mb=256) as box:
            use(client, box, name)
        expect(agentkernel.NotFoundError, client.get_sandbox, name)
        expect(agentkernel.ValidationError, client.create_sandbox, "../x")
        assert client.get_backends().default_backend
    with agentkernel.AgentKernel(base_url=URL, api_key="wrong") as client:
        expect(agentkernel.AuthError, client.list_sandboxes)
    assert asyncio.run(use_async()) == "async\n"


def use(client: agentkernel.AgentKernel, box: agentkernel.SandboxSession, name: str) -> None:
    assert box.run(["sh", "-c", "echo $A; pwd"], env=["A=1"], workdir="/tmp").output == "1\n/tmp\n"
    assert box.run(["id", "-u"], sudo=True).output == "0\n"  # line 26: they are root already
    expect(agentkernel.ServerError, box.run, ["false"])
    assert box.info().status == "running" and box.info().memory_mb == 256
    assert box.write_files({"/workspace/a": "1"}).written == 1
    assert client.write_file(name, "tmp/f", "text") == "Wrote 4 bytes to /tmp/f"
    assert client.read_file(name, "tmp/f").content == "text"
    assert client.delete_file(name, "tmp/f") == "Deleted /tmp/f"
    assert name in [info.name for info in client.list_sandboxes()]
    uuid = client.get_sandbox(name).uuid
    assert uuid and client.get_sandbox_by_uuid(uuid).name == name
    detached = client.exec_detached(name, ["sleep", "600"])
    assert client.detached_status(name, detached.id).status == "running"
    assert [entry.id for entry in client.detached_list(name)] == [detached.id]
    client.detached_kill(name, detached.id)
    assert client.detached_logs(name, detached.id).stdout == ""
    assert client.extend_ttl(name, by="1h")
    assert client.get_sandbox_logs(name)
    taken = client.take_snapshot(name, snapshot_name=f"{name}-s")
    assert taken.sandbox == name and client.get_snapshot(f"{name}-s").name == f"{name}-s"
    assert client.restore_snapshot(f"{name}-s").name == f"{name}-restored"
    client.remove_sandbox(f"{name}-restored")
    assert f"{name}-s" in [snapshot.name for snapshot in client.list_snapshots()]
    client.delete_snapshot(f"{name}-s")


async def use_async() -> str:
    async with agentkernel.AsyncAgentKernel(base_url=URL, api_key=KEY, timeout=WAIT) as client:
        output: str = (await client.run(["echo", "async"])).output
        return output


main(sys.argv[1])
