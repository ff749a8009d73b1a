"""The code interpreter by the asynchronous half of the stock Python SDK: every method once."""

import asyncio
from typing import Any

import pytest
from e2b import NotFoundException
from e2b_code_interpreter import AsyncSandbox
from lab.e2b import Door
from lab.sandboxes import ONE_RUNTIME
from lab.waiting import PATIENCE

LONG = 4 * PATIENCE


@pytest.mark.parametrize("runtime", ONE_RUNTIME, indirect=True, scope="module")
async def test_every_method(code_door: Door) -> None:
    box = await AsyncSandbox.create(timeout=600, envs={"FOO": "bar"}, request_timeout=LONG, **code_door.options)
    try:
        heard: list[str] = []

        async def hear(one: Any) -> None:
            heard.append(one.line)

        done = await box.run_code("print('x'); import os; os.environ['FOO']", on_stdout=hear, timeout=LONG)
        assert (done.text, heard, done.error) == ("bar", ["x\n"], None)
        made = await box.create_code_context(cwd="/tmp", request_timeout=LONG)
        both = await asyncio.gather(
            *(box.run_code("import os; os.getcwd()", timeout=LONG, **where) for where in ({}, {"context": made}))
        )
        assert [one.text for one in both] == ["/home/user", "/tmp"]
        assert made.id in [one.id for one in await box.list_code_contexts()]
        await box.restart_code_context(made)
        await box.remove_code_context(made)
        with pytest.raises(NotFoundException):
            await box.run_code("1", context=made)
    finally:
        assert await box.kill() is True
