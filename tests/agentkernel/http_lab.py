"""A served HTTP interface on a free port, and plain requests to it."""

import contextlib
import http.client
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

from .conftest import WAIT, Cli


class Server:
    """`atoll serve --agentkernel` as its own process."""

    def __init__(self, port: int, key: str | None) -> None:
        self.port = port
        self.key = key

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            sent = {"Content-Type": "application/json"} if data is not None else {}
            if self.key:
                sent["Authorization"] = f"Bearer {self.key}"
            sent.update(headers or {})
            connection.request(method, path, data, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def data(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        found, answer = self.request(method, path, body)
        assert found == status and answer["success"] is True, (found, answer)
        return answer["data"]

    def refused(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, str]:
        status, answer = self.request(method, path, body, **options)
        assert answer["success"] is False and status >= 400, (status, answer)
        return status, answer["error"]


@contextlib.contextmanager
def served(cli: Cli, *words: str, key: str | None = None) -> Iterator[Server]:
    env = {"AGENTKERNEL_API_KEY": key} if key else {}
    flags = [] if cli.name == "agentkernel" else ["--agentkernel"]
    process = cli.popen("serve", *flags, "--port", "0", *words, stderr=subprocess.PIPE, env=env)
    assert process.stderr is not None
    try:
        line = process.stderr.readline().decode()
        found = re.search(r":(\d+)", line.partition("http://")[2])
        assert found, line + process.stderr.read().decode()
        yield Server(int(found[1]), key)
    finally:
        process.terminate()
        process.wait(WAIT)
        process.stderr.close()
