"""atoll's own tool `sandbox_shell`: a shell that stays between calls, and only in atoll's toolset."""

from typing import Any

from mcp.client import Client

from atoll.surfaces.mcp.tools import TOOLSETS


async def test_everyday_30_a_shell_stays_between_calls(door: Any) -> None:
    async with Client(door.url) as client:

        async def use(**arguments: Any) -> Any:
            return (await client.call_tool("sandbox_shell", arguments)).structured_content

        first = await use(command="cd /tmp; x=4; echo begun")
        assert (first["stdout"], first["exit_code"], first["shell_ended"]) == ("begun\n", 0, False)
        again = await use(command="pwd; echo $x; (exit 3)", shell_id=first["shell_id"])
        assert (again["stdout"], again["exit_code"]) == ("/tmp\n4\n", 3)
        slow = await use(command="sleep 100", shell_id=first["shell_id"], timeout=1)
        assert slow["timed_out"] and not slow["shell_ended"]
        assert (await use(action="close", shell_id=first["shell_id"]))["state"] == "ended"
        assert (await use(command="id -u", user="nobody"))["stdout"] == "65534\n"
        assert (await client.call_tool("sandbox_shell", {"command": "true", "user": "a b;c"})).is_error
        wrong = await client.call_tool("sandbox_shell", {"command": "true", "shell_id": first["shell_id"]})
        assert wrong.is_error


def test_the_other_toolsets_are_as_they_were() -> None:
    assert [len(TOOLSETS[name]) for name in ("k8e", "agentkernel", "all")] == [12, 9, 22]
