"""The published clients, as they are: `agentkernel-sdk` from PyPI and `agentkernel` from npm."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import npm

from .conftest import WAIT, Cli
from .http_lab import Server, served

NPM_VERSION = "0.18.1"
KEY = "a-key-for-clients"


@pytest.fixture(scope="module")
def server(home: str) -> Iterator[Server]:
    with served(Cli(home, "/"), key=KEY) as made:
        yield made


def test_everyday_26_python_client(server: Server) -> None:
    try:
        importlib.metadata.version("agentkernel-sdk")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("agentkernel-sdk is not installed")
    script = Path(__file__).with_name("python_client.py")
    env = {**os.environ, "URL": server.url, "KEY": KEY}
    command = [sys.executable, "-I", str(script), f"p{os.urandom(5).hex()}"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=WAIT, cwd="/")
    assert done.returncode == 0, done.stderr.decode()


SCRIPT = """
import { AgentKernel, NotFoundError } from 'agentkernel';
const client = new AgentKernel({ baseUrl: process.env.URL, apiKey: process.env.KEY, timeout: 240000 });
const found = { health: await client.health() };
found.run = (await client.run(['sh', '-c', 'echo hi'])).output;
found.stream = [];
for await (const event of client.runStream(['sh', '-c', 'echo live'])) {
  if (event.type === 'output') found.stream.push(event.data.data);
  if (event.type === 'done') found.done = event.data.exit_code;
}
const box = await client.sandbox(process.env.NAME);
found.exec = (await box.run(['cat', '/etc/hostname'])).output.length > 1;
found.failed = await box.run(['cat', '/workspace/none']).catch((error) => error.message.includes('none'));
found.false = await client.run(['false']).then(() => 'success', (error) => error.constructor.name);
await client.writeFile(process.env.NAME, 'tmp/n', 'node');
found.read = (await client.readFile(process.env.NAME, 'tmp/n')).content;
found.listed = (await client.listSandboxes()).some((info) => info.name === process.env.NAME);
await box.remove();
try { await client.getSandbox(process.env.NAME); } catch (error) { found.gone = error instanceof NotFoundError; }
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npm.install(tmp_path_factory.mktemp("npm"), f"agentkernel@{NPM_VERSION}")


def test_everyday_26_node_client(server: Server, node_client: Path) -> None:
    (node_client / "use.mjs").write_text(SCRIPT)
    env = {**os.environ, "URL": server.url, "KEY": KEY, "NAME": f"n{os.urandom(5).hex()}"}
    done = subprocess.run(["node", "use.mjs"], cwd=node_client, env=env, capture_output=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "health": "ok", "run": "hi\n", "stream": ["live\n"], "done": 0, "exec": True,
        "failed": True, "false": "ServerError", "read": "node", "listed": True,
        "gone": True,
    }  # fmt: skip
