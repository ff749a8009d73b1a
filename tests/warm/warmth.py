"""What these tests share: whether a warm interpreter waits in a sandbox, and a run that certainly was served by it."""

import re
from typing import Any

from sandbox_lab import Lab, until

from atoll import ExecResult, Sandbox


def counts(lab: Lab, box: Sandbox) -> dict[str, Any]:
    status, answer = lab.ask("GET", f"/v1/sandboxes/{box.id}/usage")
    assert status == 200, answer
    found: dict[str, Any] = answer["warm"]
    return found


def heat(lab: Lab, box: Sandbox) -> None:
    """Wait until an interpreter waits; a first run makes it start."""
    if not counts(lab, box)["ready"]:
        box.run("pass")
        until(lambda: counts(lab, box)["ready"], f"a warm interpreter waits: {counts(lab, box)}")


def warm(lab: Lab, box: Sandbox, argv: list[str], **options: Any) -> ExecResult:
    """Run it, and make sure that it was not a cold start."""
    heat(lab, box)
    before = counts(lab, box)["hits"]
    result = box.exec(argv, **options)
    assert counts(lab, box)["hits"] == before + 1, "this was a cold start"
    return result


def cold(box: Sandbox, argv: list[str], **options: Any) -> ExecResult:
    """The same by a fresh interpreter: a user that is named, though it is the same one, rules the warm one out."""
    return box.exec(argv, user="root", **options)


def told(result: ExecResult) -> tuple[Any, ...]:
    """All that a caller learns of what a program did. Where an object lies in memory differs in any two runs."""
    stdout, stderr = (re.sub(r"\b0x[0-9a-f]+", "0x", text) for text in (result.stdout, result.stderr))
    return result.exit_code, result.signal, result.status, stdout, stderr, result.stdout_bytes
