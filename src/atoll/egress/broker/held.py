"""Connections that wait for a person, on the broker's side: one question for each sandbox, name and port.

However many connections wait for the same thing, and however often a program tries again, the daemon is asked once at a
time. Who decides, how long an answer counts and what people see is the daemon's business; no answer is a no.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from atoll.egress.broker.sandbox import Member
from atoll.egress.control import wire

ANSWER_SECONDS: Final = 900.0  # longer than any approval lives: the daemon says when nobody decided in time
NOBODY: Final = "needs approval, and nobody can be asked now"

Question = Callable[[wire.Message, float], Awaitable[wire.Message]]
_Key = tuple[str, str, int]


class Consents:
    """Questions under way; `question` brings one to the daemon and gives an empty answer when there is none."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._under_way: dict[_Key, asyncio.Task[str]] = {}

    async def ask(self, member: Member, name: str, port: int) -> str:
        """Nothing when the connection may be, else why not."""
        key = (member.link.sandbox, name, port)
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.get_running_loop().create_task(self._put(key))
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(task)  # whoever hangs up leaves the question to the others

    async def _put(self, key: _Key) -> str:
        sandbox, name, port = key
        answer = await self._question({"op": "ask", "sandbox": sandbox, "name": name, "port": port}, ANSWER_SECONDS)
        if answer.get("ok") is True:
            return ""
        return str(answer.get("why") or NOBODY)[:500]
