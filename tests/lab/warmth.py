"""What these tests share: whether a warm interpreter waits in a sandbox, and a run that certainly was served by it."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from atoll import ExecResult, Sandbox
from lab.sandboxes import LONG, Lab, until


def sample(runtime: str, at: int) -> None:
    """Take every program on `container` and every third on gVisor, where each costs a second; in the long run all of them."""
    if runtime == "gvisor" and at % 3 and not LONG:
        pytest.skip("in the long run")


def counts(lab: Lab, box: Sandbox) -> dict[str, Any]:
    status, answer = lab.ask("GET", f"/v1/sandboxes/{box.id}/usage")
    assert status == 200, answer
    found: dict[str, Any] = answer["warm"]
    return found


def heat(lab: Lab, box: Sandbox) -> None:
    """Wait until an interpreter waits."""
    _heat(lambda: counts(lab, box), lambda: box.run("pass"))


def _heat(look: Callable[[], dict[str, Any]], run: Callable[[], object]) -> None:
    """A first run makes one start, and each run the next; when none has come for long another run is tried."""
    again = 0.0

    def waits() -> bool:
        nonlocal again
        found = look()
        if found["ready"]:
            return True
        if time.monotonic() > again:
            if again or not found["hits"] + found["misses"]:
                run()
            again = time.monotonic() + 10
        return False

    until(waits, f"a warm interpreter waits: {look()}")


def warm(lab: Lab, box: Sandbox, argv: list[str], **options: Any) -> ExecResult:
    """Run it, and make sure that it was not a cold start."""
    heat(lab, box)
    return _served(lambda: counts(lab, box), lambda: box.exec(argv, **options))


def cold(box: Sandbox, argv: list[str], **options: Any) -> ExecResult:
    """The same by a fresh interpreter: a user that is named, though it is the same one, rules the warm one out."""
    return box.exec(argv, user="root", **options)


def told(result: ExecResult) -> tuple[Any, ...]:
    """All that a caller learns of what a program did. Where an object lies in memory, and the pid, differ in any two runs."""
    stdout, stderr = (re.sub(r"\b0x[0-9a-f]+|\(node:\d+\)", "0x", text) for text in (result.stdout, result.stderr))
    return result.exit_code, result.signal, result.status, stdout, stderr, result.stdout_bytes


def node_counts(lab: Lab, box: Sandbox) -> dict[str, Any]:
    found: dict[str, Any] = counts(lab, box)["node"]
    return found


def heat_node(lab: Lab, box: Sandbox) -> None:
    """Wait until a Node waits."""
    _heat(lambda: node_counts(lab, box), lambda: box.exec(["node", "-e", "0"]))


def warm_node(lab: Lab, box: Sandbox, argv: list[str], **options: Any) -> ExecResult:
    """Run it, and make sure that it was not a cold start."""
    heat_node(lab, box)
    return _served(lambda: node_counts(lab, box), lambda: box.exec(argv, **options))


def _served(look: Callable[[], dict[str, Any]], run: Callable[[], ExecResult]) -> ExecResult:
    before = look()["hits"]
    result = run()
    assert look()["hits"] == before + 1, "this was a cold start"
    return result
