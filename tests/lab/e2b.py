"""A served door of E2B's interface, and plain requests to it."""

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lab.sandboxes import Lab
from lab.waiting import PATIENCE

ENVD = 49983


@dataclass
class Door:
    """Where it listens, and the key of the SDKs."""

    lab: Lab
    port: int
    key: str
    runtime: str

    @property
    def env(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.port}"
        return {
            "E2B_API_KEY": self.key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_DOMAIN": f"localhost:{self.port}",
        }  # fmt: skip

    @property
    def options(self) -> dict[str, str]:
        """What the SDK's methods take in place of the environment."""
        url = f"http://127.0.0.1:{self.port}"
        return {"api_key": self.key, "api_url": url, "sandbox_url": url, "domain": f"localhost:{self.port}"}

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, key: str | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """One request as any client could send it: status, JSON or bytes, headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            sent = {
                "X-API-Key": self.key if key is None else key,
                "Content-Type": "application/json",
                **(headers or {}),
            }
            connection.request(method, path, data, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            raw = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
            is_json = found.get("content-type", "").startswith("application/json") and raw
            return answer.status, json.loads(raw) if is_json else raw, found
        finally:
            connection.close()

    def envd(
        self, box: Any, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """A request to envd of a sandbox, with its token."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        place = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(ENVD)}
        token = {"X-Access-Token": box._envd_access_token}
        return self.ask(method, path, body, headers={**place, **token, **given}, key="")


@contextmanager
def opened(lab: Lab, runtime: str) -> Iterator[int]:
    """`atoll serve --e2b` as its own process; the port."""
    command = [sys.executable, "-m", "atoll", "serve", "--e2b=127.0.0.1:0"]
    env = {**lab.env, "ATOLL_RUNTIME": runtime}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        line = process.stderr.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line
        yield int(found[1])
    finally:
        process.terminate()
        process.wait(PATIENCE)
        process.stderr.close()


def env_key(lab: Lab, port: int) -> dict[str, str]:
    """What `atoll e2b env` prints, with a new key."""
    done = lab.cli("e2b", "env", f"k{os.urandom(6).hex()}", "--address", f"127.0.0.1:{port}")
    assert done.returncode == 0, done.stderr
    return dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.decode().splitlines())


def new_key(lab: Lab, name: str = "") -> str:
    """A key that may call as often as tests do."""
    quotas = [
        word for one in ("write", "read") for word in ("--quota", f"{one}_burst=1000", "--quota", f"{one}_rate=1000")
    ]
    done = lab.cli("key", "create", name or f"k{os.urandom(6).hex()}", "--json", *quotas)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["e2b_key"])
