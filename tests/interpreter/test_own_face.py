"""The code interpreter by atoll's own faces: SDK, REST, command line, MCP."""

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from lab.sandboxes import Lab
from lab.waiting import PATIENCE

import atoll
from atoll import CellOutcome, CellResult, Output, errors
from atoll.cli.interpreter import drawing

LONG = 4 * PATIENCE
PLOT = "import matplotlib.pyplot as plt; plt.bar(['a'], [1]); plt.show()"


def test_cells_keep_their_variables(notebook: atoll.Sandbox) -> None:
    interpreter = notebook.interpreter()
    first = interpreter.run("import os; x = 20; print('out'); os.environ['FOO']", timeout=LONG)
    assert (first.text, first.stdout, first.error, first.truncated, first.timed_out) == (
        "bar",
        "out\n",
        None,
        False,
        False,
    )
    again = interpreter.run("x + 1", timeout=LONG)
    assert again.text == "21" and again.execution_count == (first.execution_count or 0) + 1
    wrong = interpreter.run("1/0", timeout=LONG)
    assert wrong.error is not None and wrong.error.name == "ZeroDivisionError" and "1/0" in wrong.error.traceback
    assert interpreter.run("process.env.ONE", language="js", env={"ONE": "1"}, timeout=LONG).text == "1"
    with pytest.raises(errors.InvalidArgument, match="python, javascript, typescript, bash"):
        interpreter.run("1", language="r")


def test_results_come_in_every_form(notebook: atoll.Sandbox) -> None:
    drawn = notebook.interpreter().run(PLOT, timeout=LONG)
    assert drawn.error is None, drawn.error
    assert base64.b64decode(drawn.results[0].png or "").startswith(b"\x89PNG")
    assert drawn.results[0].chart["type"] == "bar" and "chart" in drawn.results[0].formats


def test_a_stream_gives_what_comes(notebook: atoll.Sandbox) -> None:
    items = list(notebook.interpreter().stream("print('a'); display('b'); 'c'", timeout=LONG))
    assert [type(item) for item in items if not isinstance(item, Output)] == [CellResult, CellResult, CellOutcome]
    assert b"".join(item.data for item in items if isinstance(item, Output)) == b"a\n"
    assert [item.text for item in items if isinstance(item, CellResult)] == ["b", "c"]


def test_contexts(notebook: atoll.Sandbox) -> None:
    interpreter = notebook.interpreter()
    made = interpreter.create_context(cwd="/tmp")
    assert interpreter.run("y = 1; import os; os.getcwd()", context=made, timeout=LONG).text == "/tmp"
    assert made in interpreter.contexts()
    interpreter.restart_context(made)
    assert (interpreter.run("y", context=made, timeout=LONG).error or made).name == "NameError"  # type: ignore[union-attr]
    interpreter.remove_context(made)
    with pytest.raises(errors.NotFound):
        interpreter.run("1", context=made.id)


def test_time_and_size_are_bounded(lab: Lab, notebook: atoll.Sandbox) -> None:
    interpreter = notebook.interpreter()
    late = interpreter.run("print('begun', flush=True)\nwhile True: pass", timeout=2)
    assert late.timed_out and late.error is None
    assert interpreter.run("'on'", timeout=LONG).text == "on"
    much = interpreter.run("print('x' * 100_000); print('y' * 10_000_000); 'end'", output_limit=200_000, timeout=LONG)
    assert much.truncated and len(much.stdout) <= 200_000 and much.error is None
    with pytest.raises(errors.TooLarge):
        interpreter.run("display({'text/plain': 'z' * (40 << 20)}, raw=True)", timeout=LONG, output_limit=64 << 20)
    assert interpreter.run("'on'", timeout=LONG).text == "on"
    assert not lab.ask("GET", "/v1/accounts")[1]["accounts"].get(f"sandbox {notebook.info().id}", {}).get("memory")


def test_who_has_no_interpreter_is_told(lab: Lab, runtime: str) -> None:
    with lab.sandbox(runtime=runtime) as plain, pytest.raises(errors.FailedPrecondition, match="no interpreter"):
        plain.interpreter().run("1")


def test_command_line(lab: Lab, notebook: atoll.Sandbox, tmp_path: Path) -> None:
    ref = notebook.info().id
    done = lab.cli("interpreter", ref, "-c", "print('p'); 6 * 7")
    assert (done.returncode, done.stdout) == (0, b"p\n42\n"), done.stderr
    assert lab.cli("interpreter", ref, stdin=b"z = 5\nz + 1\n").stdout == b"6\n"
    wrong = lab.cli("interpreter", ref, "-c", "1/0")
    assert wrong.returncode == 1 and b"ZeroDivisionError" in wrong.stderr
    drawn = lab.cli("interpreter", ref, "--save", str(tmp_path / "charts"), "-c", PLOT)
    path = drawn.stdout.decode().strip()
    assert drawn.returncode == 0 and path.startswith(str(tmp_path)) and Path(path).read_bytes().startswith(b"\x89PNG")


def test_terminals_that_show_images() -> None:
    raw = b"\x89PNG" + os.urandom(9000)
    kitty = drawing(raw, {"TERM": "xterm-kitty"})
    assert kitty is not None
    pieces = re.findall(rb"\x1b_G([^;]*);([A-Za-z0-9+/=]*)\x1b\\", kitty)
    assert base64.b64decode(b"".join(data for _, data in pieces)) == raw and pieces[0][0] == b"a=T,f=100,m=1"
    assert [head for head, _ in pieces[1:]] == [b"m=1"] * (len(pieces) - 2) + [b"m=0"]
    iterm = drawing(raw, {"TERM_PROGRAM": "iTerm.app"})
    assert iterm is not None and base64.b64decode(iterm.partition(b":")[2].rstrip(b"\x07")) == raw
    assert drawing(raw, {"TERM": "xterm"}) is None


async def test_mcp_returns_images_as_images(lab: Lab, notebook: atoll.Sandbox) -> None:
    import sys

    from mcp import StdioServerParameters
    from mcp.client import Client
    from mcp.client.stdio import stdio_client

    server = StdioServerParameters(command=sys.executable, args=["-m", "atoll", "mcp", "--tools", "all"], env=lab.env)
    async with Client(stdio_client(server)) as client:

        async def use(code: str, **more: Any) -> Any:
            return await client.call_tool(
                "sandbox_interpreter", {"code": code, "session_id": f"sess-{notebook.info().id}", **more}
            )

        done = await use("w = 3; print('p'); w")
        assert json.loads(done.content[0].text) | {"execution_count": 0} == {
            "values": ["3"], "stdout": "p\n", "stderr": "", "execution_count": 0, "timed_out": False, "truncated": False, "images": 0,
        }  # fmt: skip
        drawn = await use(PLOT)
        assert [part.type for part in drawn.content] == ["text", "image"] and drawn.content[1].mime_type == "image/png"
        assert (await use("w / 0")).is_error
