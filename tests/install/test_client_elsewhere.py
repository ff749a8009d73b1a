"""The client where only Python is: no module, function or constant that Linux alone has.

A call runs in an interpreter from which all of that was taken before the first import. It reaches a real daemon over TLS.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.command_line import environment
from lab.grpc_daemon import GrpcDaemon, started

LACKING = Path(__file__).with_name("lacking.py")


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[GrpcDaemon, dict[str, str]]]:
    daemon = GrpcDaemon("")
    with started(daemon):
        ca = daemon.home / "elsewhere.crt"
        ca.write_text(daemon.ca)
        yield (
            daemon,
            {"ATOLL_ENDPOINT": f"localhost:{daemon.port}", "ATOLL_APIKEY": daemon.key("far"), "ATOLL_CERT": str(ca)},
        )


@pytest.fixture
def call(gateway: tuple[GrpcDaemon, dict[str, str]], tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs a program with nothing of Linux and returns what it printed."""
    env = environment(str(tmp_path / "home"), HOME=str(tmp_path), **gateway[1])

    def run(program: str, *words: str, code: int = 0, stdin: str = "", **more: str) -> str:
        argv = [sys.executable, "-c", f"exec(open({str(LACKING)!r}).read())\n{program}", *words]
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, env={**env, **more}, cwd=tmp_path, timeout=240
        )
        assert "Traceback" not in done.stderr and done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout if code == 0 else done.stdout + done.stderr

    return run


MAIN = "import sys; sys.argv[0] = 'atoll'; from atoll.cli import main; sys.exit(main())"


def test_the_interpreter_lacks_what_it_should(call) -> None:  # type: ignore[no-untyped-def]
    program = (
        "import os, sys\ntry:\n import fcntl\nexcept ImportError: print('none', hasattr(os, 'fork'), sys.platform)"
    )
    assert call(program) == "none False win32\n"


def test_the_command_line_works_with_an_endpoint(call, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert "sandbox" in call(MAIN, "--help")
    call(MAIN, "version")
    assert '"stdout":"7\\n"' in call(MAIN, "sandbox", "run", "print(3 + 4)", "--lang", "python", "--json").replace(
        '": ', '":'
    )
    assert call(MAIN, "sandbox", "run", "echo again", "--raw") == "again\n"
    session = str(json.loads(call(MAIN, "sandbox", "run", "echo there > put.txt"))["session_id"])
    assert call(MAIN, "sandbox", "read", session, "/workspace/put.txt", "--raw") == "there\n"
    assert session in call(MAIN, "sandbox", "list")
    call(MAIN, "sandbox", "destroy", session)


def test_the_sdk_works_with_an_endpoint(call) -> None:  # type: ignore[no-untyped-def]
    program = (
        "import os\nfrom atoll import Sandbox\n"
        "with Sandbox.create(endpoint=os.environ['ATOLL_ENDPOINT']) as box:\n"
        "    box.files.write('/workspace/a', b'there')\n"
        "    print(box.exec(['cat', '/workspace/a']).stdout, box.run('print(1)', 'python').exit_code)\n"
    )
    assert call(program) == "there 0\n"


def test_mcp_on_stdio_works_with_an_endpoint(call) -> None:  # type: ignore[no-untyped-def]
    hello = (
        '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},'
        '"clientInfo":{"name":"t","version":"1"}}}\n{"jsonrpc":"2.0","method":"notifications/initialized"}\n'
        '{"jsonrpc":"2.0","id":2,"method":"tools/list"}\n'
    )
    tools = call(MAIN, "mcp", stdin=hello)
    assert '"sandbox_run"' in tools
    ask = '{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"sandbox_run","arguments":{"code":"echo from afar"}}}\n'
    assert "from afar\\n" in call(MAIN, "mcp", stdin=hello + ask)
    refused = call(MAIN, "mcp", "--allow-host-access", stdin=hello)
    assert '"error"' in refused and '"tools":[' not in refused


def test_what_needs_linux_says_so(call) -> None:  # type: ignore[no-untyped-def]
    told = call(MAIN, "sandbox", "run", "true", code=1, ATOLL_ENDPOINT="", ATOLL_CERT="", ATOLL_APIKEY="")
    assert "sandboxes run on Linux" in told and "--endpoint" in told, told
    assert "Linux" in call(MAIN, "serve", code=125)
