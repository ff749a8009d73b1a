"""Our MCP server with the tools the official suite calls by name, in a process of its own: `conformance_server.py DIRECTORY`.

Listener, admission, both lifecycles, sessions, the SDK's transport, calls, progress and results are the product's; only
the table of tools is another. The port is the first line it prints.
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from atoll.accounts import Accounts
from atoll.core import Core
from atoll.core.access.credentials import Doorkeeper
from atoll.core.access.keys import Keys
from atoll.server.tcp import Door
from atoll.surfaces.mcp import hello, settings
from atoll.surfaces.mcp.client import HANDLERS, Call
from atoll.surfaces.mcp.http import McpHttp
from atoll.surfaces.mcp.tools import TOOLSETS, Nothing, Tool

NAME = "conformance"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
SILENCE = "UklGRiQAAABXQVZFZm10IBAAAAABAAEARKwAAIhYAQACABAAZGF0YQAAAAA="
TEXT = {"type": "text", "text": "some text"}
IMAGE = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
AUDIO = {"type": "audio", "data": SILENCE, "mimeType": "audio/wav"}
RESOURCE = {"type": "resource", "resource": {"uri": "test://x", "mimeType": "text/plain", "text": "inside"}}
ANSWERS = {
    "test_simple_text": [TEXT],
    "test_image_content": [IMAGE],
    "test_audio_content": [AUDIO],
    "test_embedded_resource": [RESOURCE],
    "test_multiple_content_types": [TEXT, IMAGE, RESOURCE],
}
ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": ADDRESS},
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}


class WithSchema(Tool):
    def describe(self, toolset: str) -> dict[str, Any]:
        return {**Tool.describe(self, toolset), "inputSchema": SCHEMA}


def add(name: str, kind: type[Tool] = Tool) -> None:
    TOOLSETS[NAME][name] = kind(name, "For the suite.", Nothing, {NAME: Nothing}, {"readOnlyHint": True})

    async def answer(call: Call, _: Any) -> dict[str, Any]:
        return {"content": ANSWERS.get(name, [TEXT])}

    HANDLERS[name] = answer


async def with_progress(call: Call, _: Any) -> dict[str, Any]:
    for done in (0, 50, 100):
        if call.report is not None:
            await call.report(done, "")
    return {"content": [TEXT]}


async def broken(call: Call, _: Any) -> dict[str, Any]:
    raise ValueError("this tool always fails")


async def main(directory: Path) -> None:
    keys = Keys(directory / "keys.db")
    core = SimpleNamespace(keys=keys, keeper=Doorkeeper(keys), accounts=Accounts())  # no tool of these needs a sandbox
    door = Door(McpHttp(cast(Core, core), settings.OpenHttp(toolset=NAME, port=0)))
    print(await door.open("127.0.0.1", 0), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the test lets go


if __name__ == "__main__":
    TOOLSETS[NAME] = {}
    settings.TOOLSETS = (*hello.TOOLSETS, NAME)
    hello.NAMES[NAME] = hello.INSTRUCTIONS[NAME] = NAME
    for word in (*ANSWERS, "test_tool_with_progress", "test_error_handling"):
        add(word)
    add("json_schema_2020_12_tool", WithSchema)
    HANDLERS.update(test_tool_with_progress=with_progress, test_error_handling=broken)
    asyncio.run(main(Path(sys.argv[1])))
