"""atoll's own tool `sandbox_terminal`: open, type, read, resize, leave, join again and close."""

from typing import Any

from mcp.client import Client


class Screen:
    """A terminal as a model uses it; `shown` is all it has read."""

    def __init__(self, client: Any, **fixed: Any) -> None:
        self._client = client
        self._fixed = fixed
        self.shown = ""

    async def use(self, action: str, **arguments: Any) -> Any:
        done = await self._client.call_tool("sandbox_terminal", {"action": action, **self._fixed, **arguments})
        assert not done.is_error, done
        answer = done.structured_content
        self._fixed.update(terminal_id=answer["terminal_id"], offset=answer.get("next_offset", 0))
        self.shown += answer.get("output", "")
        return answer

    async def until(self, text: str) -> Any:
        for _ in range(60):
            answer = await self.use("read", wait=5)
            if text in self.shown or answer["state"] != "running":
                break
        assert text in self.shown, self.shown
        return answer


async def test_a_program_that_asks_is_answered_and_joined_again(door: Any) -> None:
    ask = "import os; n = input('name? '); print('hello', n, *os.get_terminal_size()); input()"
    async with Client(door.url) as client, Client(door.url) as other:
        made = (await client.call_tool("sandbox_create_session", {})).structured_content["session_id"]
        screen = Screen(client, session_id=made)
        opened = await screen.use("open", command=["python3", "-c", ask], rows=30, cols=100)
        await screen.until("name? ")
        await screen.use("resize", rows=40, cols=120)
        await screen.use("write", input="atoll\r")
        await screen.until("hello atoll 120 40")
        assert screen.shown.count("name?") == 1, "what was read is not read again"

        again = Screen(other, session_id=made, terminal_id=opened["terminal_id"])
        await again.until("hello atoll 120 40")
        assert "name? " in again.shown, "who joins sees all that is kept"
        listed = (await other.call_tool("sandbox_terminal", {"action": "list", "session_id": made})).structured_content
        assert [(one["terminal_id"], one["state"]) for one in listed["terminals"]] == [
            (opened["terminal_id"], "running")
        ]
        typed = Screen(other, session_id=made, terminal_id=opened["terminal_id"])
        assert "name?" not in (await typed.use("write", input="\u0003"))["output"], "what comes next, and nothing older"
        ended = await screen.until("KeyboardInterrupt")
        while ended["state"] == "running":
            ended = await screen.use("read", wait=5)
        assert ended["exit_code"] == 130, ended

        quiet = Screen(client, session_id=made)
        await quiet.use("open", echo=False, user="nobody", env={"PS1": "", "A": "4"})
        await quiet.use("write", input="echo $A $(id -u); seq 9999 | tr -d '\\n'; echo end\r")
        await quiet.until("end")
        assert "4 65534" in quiet.shown and "echo $A" not in quiet.shown
        assert "".join(map(str, range(1, 10_000))) in quiet.shown, "a long answer comes in parts, and all of it"
        assert (await quiet.use("close"))["state"] != "running"
        for wrong in (
            {"action": "read"},
            {"action": "write", "terminal_id": "nobody"},
            {"action": "open", "user": "a b"},
        ):
            assert (await client.call_tool("sandbox_terminal", {**wrong, "session_id": made})).is_error, wrong
        await client.call_tool("sandbox_destroy_session", {"session_id": made})
