"""The network on the command line: verbs in K8E's JSON, notes for people on stderr."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from lab.network import until

import atoll
from atoll import AsyncSandbox, Sandbox
from atoll.egress import default_hosts

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(atoll.__file__)))


class Cli:
    """`atoll` as a process, on one home."""

    def __init__(self, home: str) -> None:
        self.home = home
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("ATOLL_", "K8E_"))}
        self.env = {**kept, "ATOLL_HOME": home, "PYTHONPATH": SOURCE, "ATOLL_RUNTIME": "container"}

    def __call__(self, *words: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "atoll", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180,
            env=self.env,
        )  # fmt: skip
        assert "Traceback" not in done.stderr + done.stdout, done
        return done

    def ok(self, *words: str) -> Any:
        done = self(*words)
        assert done.returncode == 0, done
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cli() -> Iterator[Cli]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = Cli(tempfile.mkdtemp(prefix="atx-", dir="/tmp"))
    yield made
    made("daemon", "stop", "--force")
    shutil.rmtree(made.home)


@pytest.fixture(scope="module")
def box(cli: Cli) -> str:
    return str(cli.ok("sandbox", "create")["session_id"])


def test_a_refusal_is_noted_on_stderr(cli: Cli, box: str) -> None:
    """Say after a run what was blocked and what would allow it; with JSON, in the object too."""
    done = cli("sandbox", "run", "--session-id", box, "getent hosts nowhere.example || exit 1")
    assert done.returncode == 1
    assert [item["name"] for item in json.loads(done.stdout)["blocked"]] == ["nowhere.example"]
    note = (
        "blocked: nowhere.example is not an allowed host; allow it with: atoll sandbox run --allow-host nowhere.example"
    )
    assert note in done.stderr and box in done.stderr
    for words in (("sandbox", "run", "--raw", "--session-id", box, "getent hosts other.example"),
                  ("exec", box, "getent", "hosts", "third.example")):  # fmt: skip
        done = cli(*words)
        assert done.returncode == 2 and ".example is not an allowed host" in done.stderr, done


def test_allow_hosts(cli: Cli, box: str) -> None:
    """Show, replace, add, remove, empty and restore the list (k8e D34: every host given counts)."""
    five = list(default_hosts())
    assert cli.ok("sandbox", "allow-hosts", "--clear", "--session-id", box)["allowed_hosts"] == five
    shown = cli.ok("sandbox", "allow-hosts", "--session-id", box)
    assert shown["session_id"] == box and shown["allowed_hosts"] == five
    for words, expected in (
        (("a.example", "b.example"), ["a.example", "b.example"]),
        (("--add", "c.example,d.example"), ["a.example", "b.example", "c.example", "d.example"]),
        (("--remove", "a.example", "d.example"), ["b.example", "c.example"]),
        (("--hosts", "x.example,y.example:8443"), ["x.example", "y.example:8443"]),
        (("none",), []),
    ):
        assert cli.ok("sandbox", "allow-hosts", *words, "--session-id", box)["allowed_hosts"] == expected
    assert cli.ok("sandbox", "get", box)["allowed_hosts"] == []
    assert cli.ok("sandbox", "allow-hosts", "--clear", "--session-id", box)["allowed_hosts"] == five


@pytest.mark.parametrize(
    "words",
    [("--add",), ("--add", "--remove", "x.example"), ("--clear", "x.example"), ("http://x",), ("none", "x.example")],
)
def test_bad_lists(cli: Cli, box: str, words: tuple[str, ...]) -> None:
    """Refuse contradictions and malformed hosts, and change nothing."""
    before = cli.ok("sandbox", "allow-hosts", "--session-id", box)["allowed_hosts"]
    done = cli("sandbox", "allow-hosts", *words, "--session-id", box)
    assert done.returncode == 1 and json.loads(done.stdout)["error"] == "invalid_argument"
    assert cli.ok("sandbox", "allow-hosts", "--session-id", box)["allowed_hosts"] == before


def test_a_sandbox_is_no_host(cli: Cli, box: str) -> None:
    """A sandbox is named first; where a host or a port belongs it is refused, and nothing is changed or made."""
    cli.ok("sandbox", "create", "--name", "mistaken", "--no-network")
    before = cli.ok("sandbox", "sessions")["sessions"]
    for words in (("allow-hosts", "mistaken"), ("allow-hosts", box), ("exposed", "mistaken")):
        assert words[1] in (box, "mistaken") and cli.ok("sandbox", *words)["session_id"] == words[1]
    for words in (("allow-hosts", "--add", "a.example", "mistaken"), ("unexpose", "8000", box)):
        done = cli("sandbox", *words)
        answer = json.loads(done.stdout)
        assert done.returncode == 1 and answer["error"] == "invalid_argument", done
        assert "--session-id" in done.stdout + done.stderr, done
    assert cli.ok("sandbox", "sessions")["sessions"] == before
    cli.ok("sandbox", "destroy", "mistaken")


def test_expose(cli: Cli, box: str) -> None:
    """Give a URL that answers, list it, take it away."""
    code = (
        "import http.server as h; s = h.HTTPServer(('127.0.0.1', 8123), h.SimpleHTTPRequestHandler); s.serve_forever()"
    )
    cli.ok("sandbox", "run", "--background", "--lang", "python", "--session-id", box, code)
    found = cli.ok("sandbox", "expose", "8123", "--session-id", box)
    assert found["port"] == 8123 and found["session_id"] == box

    def answered() -> bool:
        try:
            return bool(urllib.request.urlopen(found["url"], timeout=20).status == 200)
        except urllib.error.HTTPError:
            return False

    until(answered, "the program inside answers")
    assert [one["url"] for one in cli.ok("sandbox", "exposed", "--session-id", box)["services"]] == [found["url"]]
    assert cli.ok("sandbox", "unexpose", "--port", "8123", "--session-id", box) == {
        "ok": True, "port": 8123, "session_id": box,
    }  # fmt: skip
    assert cli.ok("sandbox", "unexpose", "8123", "--session-id", box)["ok"] is False
    assert cli.ok("sandbox", "exposed", "--session-id", box)["services"] == []
    for bad in ("0", "70000", "http"):
        assert cli("sandbox", "expose", bad, "--session-id", box).returncode == 1


def test_k8e_D28_expose_makes_the_tenants_sandbox(cli: Cli) -> None:
    """Find or make the tenant's own sandbox when none is named, and use it the next time too."""
    first = cli.ok("sandbox", "expose", "80", "--tenant", "expo")["session_id"]
    assert cli.ok("sandbox", "allow-hosts", "--tenant", "expo")["session_id"] == first
    assert cli.ok("sandbox", "run", "--tenant", "expo", "true")["session_id"] == first
    cli.ok("sandbox", "destroy", first)


def test_egress_log(cli: Cli, box: str) -> None:
    """List refusals one a line, and follow them."""
    cli("exec", box, "getent", "hosts", "logged.example")
    done = cli("egress", "log")
    assert any(line.endswith("blocked: logged.example is not an allowed host") for line in done.stdout.splitlines())
    events = [json.loads(line) for line in cli("egress", "log", "--json", "--limit", "1000").stdout.splitlines()]
    assert any(event["name"] == "logged.example" for event in events)
    followed = os.path.join(cli.home, "followed")
    command = [sys.executable, "-m", "atoll", "egress", "log", "-f", "--limit", "1"]
    with open(followed, "wb") as out:
        follower = subprocess.Popen(command, env=cli.env, stdout=out)
    try:
        until(lambda: os.path.getsize(followed) > 0, "the last refusal is printed")
        cli("exec", box, "getent", "hosts", "followed.example")
        until(lambda: "followed.example" in open(followed).read(), "the next one follows")  # noqa: SIM115
    finally:
        follower.kill()
        follower.wait(60)


def test_doctor_tells(cli: Cli) -> None:
    """Say whether allow lists can be enforced here."""
    checks = json.loads(cli("doctor", "--json").stdout)["checks"]
    assert [check["ok"] for check in checks if check["name"] == "egress"] == [True]


async def test_both_sdks(cli: Cli, box: str) -> None:
    """Change hosts and expose ports from either SDK face with the same words."""
    ref = box.removeprefix("sess-")
    plain = Sandbox.connect(ref, home=cli.home)
    assert plain.allow_hosts(["a.example"]) == ["a.example"]
    assert plain.allow_hosts(add=["b.example"], remove=["a.example"]) == ["b.example"]
    assert plain.allow_hosts([]) == []
    url = plain.expose(9000)
    assert [one["url"] for one in plain.exposed()] == [url] and plain.unexpose(9000) and not plain.unexpose(9000)
    plain.close()
    other = await AsyncSandbox.connect(ref, home=cli.home)
    assert await other.allow_hosts() == list(default_hosts())
    url = await other.expose(9000)
    assert [one["url"] for one in await other.exposed()] == [url] and await other.unexpose(9000)
    await other.close()
