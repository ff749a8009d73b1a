"""Calls of the functions over the daemon's socket, and errors as the envelopes they are."""

import json
from pathlib import Path
from typing import Any

from lab.sandboxes import Lab, until

__all__ = ["PLAIN", "Envelope", "FunctionLab", "until"]

PLAIN = {"isolation": "container", "image_allowlist": ["python", "node"], "disk_mb": 64}
KEYS = {"type", "code", "message", "docs_url", "retryable", "fix", "fix_note"}


class Envelope(Exception):
    """An error answer: `error.message` was JSON with every key the contract names."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.all: dict[str, Any] = json.loads(text)
        assert set(self.all) - {"details"} == KEYS, self.all
        assert self.all["docs_url"].endswith("#" + self.all["code"])
        assert self.all["fix"] is None or isinstance(self.all["fix"], dict)
        self.status, self.code, self.fix = status, self.all["code"], self.all["fix"]
        self.details = self.all.get("details")


class FunctionLab(Lab):
    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.configure(**(settings or {}))
        self.start()

    def configure(self, **settings: Any) -> None:
        """The operator's file (JSON is YAML). It is read with the first call."""
        (Path(self.home) / "iii.yaml").write_text(json.dumps({**PLAIN, **settings}))

    def __call__(self, function: str, payload: Any = None, /, **fields: Any) -> Any:
        status, answer = self.ask("POST", f"/functions/{function}", fields if payload is None else payload)
        if status >= 400:
            assert answer["error"]["code"] == "invocation_failed", answer
            raise Envelope(status, answer["error"]["message"])
        return answer

    def refused(self, function: str, payload: Any = None, /, **fields: Any) -> Envelope:
        try:
            answer = self(function, payload, **fields)
        except Envelope as envelope:
            return envelope
        raise AssertionError(f"{function} answered {answer}")

    def create(self, **fields: Any) -> Any:
        return self("sandbox::create", **{"image": "python", "memory_mb": 256, **fields})

    def sh(self, sandbox: str, script: str, **fields: Any) -> Any:
        return self("sandbox::exec", sandbox_id=sandbox, argv=["/bin/sh", "-c", script], **fields)

    def put(self, sandbox: str, path: str, content: str) -> None:
        self("sandbox::fs::write", sandbox_id=sandbox, path=path, content=content, parents=True)

    def get(self, sandbox: str, path: str) -> str:
        return str(self("sandbox::fs::read", sandbox_id=sandbox, path=path)["body"])

    def create_foreign(self) -> str:
        """A sandbox that was not made by a function, with an alias that looks as if it were."""
        alias = "11111111-2222-4333-8444-555555555555"
        found = [one for one in self.ask("GET", "/v1/sandboxes")[1]["sandboxes"] if one["labels"].get("mine") == "1"]
        if not found:
            limits = {"memory_mb": 256, "disk_mb": 64}
            body = {"runtime": "container", "alias": alias, "labels": {"mine": "1"}, "limits": limits, "network": False}
            status, answer = self.ask("POST", "/v1/sandboxes", body)
            assert status == 201, answer
        return alias
