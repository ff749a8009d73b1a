"""The front doors' price: `atoll run`, an MCP call and an iii function, each against the plain thing."""

import json
import os
import subprocess
import sys
from typing import IO, Any

from atoll.client.blocking import Link
from atoll.client.calls import post
from bench import peers
from bench.measure import Contender, Row

FILES = 10_000


class Mcp:
    """`atoll mcp` as an agent's child: one line out, one line back."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "atoll", "mcp"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._number = 0
        hello = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
        self.ask("initialize", hello)

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._pipes()
        self._number += 1
        stdin.write(
            json.dumps({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}).encode() + b"\n"
        )
        stdin.flush()
        while True:
            answer: dict[str, Any] = json.loads(stdout.readline())
            if answer.get("id") == self._number:
                return answer

    def run(self) -> None:
        answer = self.ask("tools/call", {"name": "sandbox_run", "arguments": {"code": "true"}})
        assert '"exit_code": 0' in json.dumps(answer).replace("\\", ""), answer

    def close(self) -> None:
        self._pipes()[0].close()
        self._process.wait(60)

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def rows(home: str, runtime: str, rounds: int) -> list[Row]:
    env = {**os.environ, "ATOLL_HOME": home, "ATOLL_RUNTIME": runtime}
    argv = [sys.executable, "-m", "atoll", "run", "python3", "-c", "print(1)"]
    run = Row(
        "atoll run, Python hello, a sandbox of its own",
        [
            Contender("python3 -c pass", peers.bare([peers.HOST_PYTHON, "-c", "pass"])),
            Contender("atoll run", lambda: subprocess.run(argv, env=env, check=True, capture_output=True, cwd="/")),
        ],
        rounds,
        goal=6.0,
    )
    mcp = Mcp(env)
    call = Row(
        "MCP sandbox_run on a live session",
        [Contender("bare sh -c true", peers.bare(["sh", "-c", "true"])), Contender("atoll mcp", mcp.run)],
        rounds * 3,
    )
    done = [run.run(_quiet), call.run(_quiet)]
    mcp.close()
    return [*done, grep(home, rounds).run(_quiet)]


def grep(home: str, rounds: int) -> Row:
    """`sandbox::fs::grep` over ten thousand files, against `grep -r` in the same sandbox."""
    link = Link(home)
    ident = link.call(post("/functions/sandbox::create", {"image": "python"}))["sandbox_id"]
    code = f"mkdir -p /tmp/t; for i in $(seq {FILES}); do echo line $i needle$((i % 100)) > /tmp/t/$i.txt; done"
    fill = {"sandbox_id": ident, "argv": ["sh", "-c", code]}
    link.call(post("/functions/sandbox::exec", fill))
    pattern = "needle7$"

    def plain() -> None:
        link.call(post("/functions/sandbox::exec", {"sandbox_id": ident, "argv": ["grep", "-rE", pattern, "/tmp/t"]}))

    def ours() -> None:
        found = link.call(
            post("/functions/sandbox::fs::grep", {"sandbox_id": ident, "path": "/tmp/t", "pattern": pattern})
        )
        assert len(found["matches"]) == FILES // 100, len(found["matches"])

    return Row(
        "grep over 10,000 files",
        [Contender("grep -r inside", plain), Contender("atoll sandbox::fs::grep", ours)],
        max(5, rounds // 3),
        goal=2.0,
    )


def _quiet(text: str) -> None:
    return None
