"""The front doors' price: an MCP call and an iii function, each against the plain thing."""

import json
import subprocess
from typing import IO, Any

from atoll.client._sync.driver import Link
from atoll.client.calls import post
from bench import programs
from bench.lab import ATOLL, Lab
from bench.measure import Contender

FILES = 10_000


class Mcp:
    """`atoll mcp` as an agent's child: one line out, one line back."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen([*ATOLL, "mcp"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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


def mcp(lab: Lab) -> list[Contender]:
    found = [Contender("bare sh -c true", programs.bare(["sh", "-c", "true"]))]
    for runtime in lab.runtimes:
        client = Mcp({**lab.env, "ATOLL_RUNTIME": runtime, "ATOLL_TENANT": f"mcp-{runtime}"})
        lab.row.callback(client.close)
        found.append(Contender(f"atoll {runtime}", client.run))
    return found


def initialize(lab: Lab) -> list[Contender]:
    """From the start of `atoll mcp` to its first answer."""
    started: list[Mcp] = []

    def close() -> None:
        while started:
            started.pop().close()

    bare = Contender("python3 -c pass", programs.bare([programs.PYTHON, "-c", "pass"]))
    return [bare, Contender("atoll", lambda: started.append(Mcp(lab.env)), after=close)]


def grep(lab: Lab) -> list[Contender]:
    """`sandbox::fs::grep` over ten thousand files, against `grep -r` in the same sandbox."""
    link = Link(lab.home)
    ident = link.call(post("/functions/sandbox::create", {"image": "python"}))["sandbox_id"]
    lab.row.callback(link.call, post("/functions/sandbox::stop", {"sandbox_id": ident}))
    code = f"mkdir -p /tmp/t; for i in $(seq {FILES}); do echo line $i needle$((i % 100)) > /tmp/t/$i.txt; done"
    link.call(post("/functions/sandbox::exec", {"sandbox_id": ident, "argv": ["sh", "-c", code]}))
    pattern = "needle7$"

    def plain() -> None:
        link.call(post("/functions/sandbox::exec", {"sandbox_id": ident, "argv": ["grep", "-rE", pattern, "/tmp/t"]}))

    def ours() -> None:
        request = {"sandbox_id": ident, "path": "/tmp/t", "pattern": pattern}
        found = link.call(post("/functions/sandbox::fs::grep", request))
        assert len(found["matches"]) == FILES // 100, len(found["matches"])

    return [Contender("grep -r inside", plain), Contender("atoll", ours)]
