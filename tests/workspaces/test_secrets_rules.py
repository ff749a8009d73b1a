"""Secrets reach commands and nothing else; rules hold commands and writes until somebody has decided."""

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.daemon import Box, DaemonProcess, Failed, until
from lab.terminal import Atoll, decide_at_terminal

CANARY = "canary-7d1f0e63"


def written(path: Path) -> Iterator[bytes]:
    """The parts of a file that were written: an empty disk has gigabytes of holes."""
    with path.open("rb") as file:
        at = 0
        while True:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole from here on
                return
            end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            yield os.pread(file.fileno(), end - at, at)
            at = end


def test_k8e_D17_a_secret_is_a_variable_of_commands_and_nothing_more(atoll: Atoll, daemon: DaemonProcess) -> None:
    atoll("secret", "set", "github", "token", stdin=CANARY.encode())
    assert atoll("secret", "list").stdout == b"github:token\n"
    made = atoll.ok("sandbox", "create", "--env", "TOKEN=plain", "--secret", "TOKEN=github:token")["session_id"]
    shown = atoll.ok("sandbox", "run", "--session-id", made, "echo got $TOKEN")
    assert shown["stdout"] == f"got {CANARY}\n", "a secret wins over env"
    ref = made.removeprefix("sess-")
    assert atoll.ok("sandbox", "get", made)["secret_env_vars"] == ["TOKEN"]
    atoll.ok("sandbox", "snapshot", "save", made, "with-secret")
    told = [daemon.raw("GET", path)[1] for path in (
        f"/v1/sandboxes/{ref}", f"/v1/sandboxes/{ref}/events", f"/v1/sandboxes/{ref}/log", "/v1/audit", "/v1/secrets",
        f"/v1/sandboxes/{ref}/commands",
    )]  # fmt: skip
    assert all(CANARY.encode() not in data for data in told)
    for path in daemon.home.rglob("*"):
        if path.is_file() and "boxes" not in path.parts:
            assert all(CANARY.encode() not in part for part in written(path)), path
    atoll("secret", "rm", "github")
    gone = atoll.fails("sandbox", "run", "--session-id", made, "echo $TOKEN")
    assert gone["error"] == "failed_precondition", "a command does not run without what it was promised"
    assert atoll.fails("sandbox", "create", "--secret", "A=github:token")["error"] == "failed_precondition"
    atoll.ok("sandbox", "snapshot", "delete", "with-secret")
    atoll.ok("sandbox", "destroy", made)


def test_a_value_is_never_an_argument_and_bad_references_are_refused(atoll: Atoll) -> None:
    assert atoll("secret", "set", "a", "b", "value").returncode != 0
    for bad in ("A", "A=b", "A=b:", "A=:c", "1A=b:c"):
        assert atoll.fails("sandbox", "create", "--secret", bad)["ok"] is False


def held(daemon: DaemonProcess, sandbox: str) -> dict[str, Any]:
    def look() -> Any:
        return next((a for a in daemon.get("/v1/approvals")["approvals"] if a["sandbox_id"] == sandbox), None)

    return dict(until(look, "it waits for approval"))


class Asking(threading.Thread):
    """A request that blocks, and what came of it."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work, self.answer, self.error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self.work()
        except Failed as failed:
            self.error = failed


@pytest.fixture
def ruled(daemon: DaemonProcess) -> Any:
    box = daemon.create(require_approval=["command:*git push*", "path:/workspace/prod/*"])
    yield box
    box.destroy()


def test_a_command_waits_and_runs_when_approved(atoll: Atoll, daemon: DaemonProcess, ruled: Box) -> None:
    assert ruled.exec("echo free")["exit_code"] == 0
    asking = Asking(lambda: ruled.exec(["echo", "git push", "--force"]))
    waiting = held(daemon, ruled.id)
    assert waiting["action"] == "echo 'git push' --force" and waiting["kind"] == "command"
    assert re.search(rb"status +approved", decide_at_terminal(atoll, waiting["id"]))
    asking.join(60)
    assert asking.answer["stdout"] == "git push --force\n"


def test_a_refused_command_does_not_run_in_any_way_of_starting_one(
    atoll: Atoll, daemon: DaemonProcess, ruled: Box
) -> None:
    ways = (
        lambda: ruled.exec("touch /workspace/ran # git push"),
        lambda: ruled.run("open('/workspace/ran','w') # git push"),
        lambda: ruled.exec("touch /workspace/ran # git push", background=True),
        lambda: list(daemon.stream(f"{ruled.path}/exec", {"command": "touch /workspace/ran # git push"})),
    )
    for way in ways:
        asking = Asking(way)
        decide_at_terminal(atoll, held(daemon, ruled.id)["id"], "--reject", "--reason", "no")
        asking.join(60)
        assert asking.error is not None and asking.error.code == "permission_denied"
        assert "rejected: no" in json.dumps(asking.error.error)
    assert ruled.exec("ls /workspace")["stdout"] == ""


def test_writes_below_a_path_wait_and_others_do_not(atoll: Atoll, daemon: DaemonProcess, ruled: Box) -> None:
    ruled.exec("mkdir /workspace/prod; echo old > /workspace/prod/a; touch /workspace/b")
    assert ruled.write("/workspace/c", b"free")["bytes"] == 4
    ways = (
        lambda: ruled.write("/workspace/prod/a", b"new"),
        lambda: ruled.write("/workspace/x/../prod/a", b"new"),
        lambda: ruled.files("move", src="/workspace/b", dst="prod/a", overwrite=True),
        lambda: ruled.files("remove", path="/workspace/prod", recursive=True),
        lambda: ruled.files("remove", path="/workspace", recursive=True),
        lambda: daemon.ask("PUT", f"{ruled.path}/tar?path=/workspace", b"\0" * 1024),
    )
    for way in ways:
        asking = Asking(way)
        waiting = held(daemon, ruled.id)
        assert waiting["kind"] == "write"
        decide_at_terminal(atoll, waiting["id"], "--reject")
        asking.join(60)
        assert asking.error is not None and asking.error.code == "permission_denied"
    assert ruled.read("/workspace/prod/a") == b"old\n"


@pytest.mark.parametrize(
    "rule",
    ["command", "command:", "other:x", "", "path: ", "host:http://x", "host:a b", "host:x.com:443", "host:*.ö.de"],
)
def test_rules_that_cannot_be_held_are_refused(daemon: DaemonProcess, rule: str) -> None:
    with pytest.raises(Failed) as caught:
        daemon.create(require_approval=[rule])
    assert caught.value.code == "invalid_argument"


def test_subagents_have_the_parents_rules(daemon: DaemonProcess, ruled: Box) -> None:
    other = daemon.post(f"{ruled.path}/subagents", {})
    assert other["require_approval"] == ruled.info()["require_approval"]


def test_the_terminal_shows_a_command_to_its_end(atoll: Atoll, daemon: DaemonProcess, ruled: Box) -> None:
    """F2-H6: what stands behind many blanks and many lines is shown before anybody can type the number."""
    command = "echo git push" + " " * 1100 + "; echo the end of it"
    stdin = "".join(f"line {number}\n" for number in range(700))
    asking = Asking(lambda: ruled.exec(command, stdin=stdin))
    seen = decide_at_terminal(atoll, held(daemon, ruled.id)["id"])
    assert "echo git push⟨1100 spaces⟩; echo the end of it".encode() in seen
    missing = [number for number in range(700) if f"| line {number}\r\n".encode() not in seen.replace(b"\r\r", b"\r")]
    assert missing == []
    asking.join(60)
    assert asking.answer["stdout"] == "git push\nthe end of it\n"
