"""What people do first: install a package from the real registries, through the broker, with nothing configured."""

import time
from collections.abc import Iterator

import pytest
from lab.daemon import DaemonProcess, running_daemon
from lab.sandboxes import reachable

from atoll.egress import default_hosts


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as made:
        yield made


SHORT = {"limits": {"memory_mb": 1024, "disk_mb": 512}}


def test_pip_and_npm_install(daemon: DaemonProcess) -> None:
    """Install a package with pip and one with npm, and use them; the default list is enough."""
    index, _, npm = default_hosts()[:3]
    if not (reachable(index) and reachable(npm)):
        pytest.skip("no registry can be reached from this machine")
    box = daemon.create(runtime="container", **SHORT)
    pip = box.exec(
        "pip install --quiet --no-cache-dir --disable-pip-version-check --target /tmp/site six && "
        "PYTHONPATH=/tmp/site python3 -c 'import six; print(six.__file__)'", timeout_ms=240_000,
    )  # fmt: skip
    assert pip["exit_code"] == 0 and pip["stdout"].strip() == "/tmp/site/six.py", pip
    if box.exec("command -v npm")["exit_code"] == 0:
        run = "cd /tmp && npm install --silent --no-audit --no-fund left-pad && node -p 'require(\"left-pad\")(1, 3)'"
        done = box.exec(run, timeout_ms=240_000)
        assert done["exit_code"] == 0 and done["stdout"].endswith("  1\n"), done
    box.destroy()


def test_a_host_that_is_not_listed_fails_at_once(daemon: DaemonProcess) -> None:
    """Fail by refusal and not by waiting, with a note that names the host (ten times the bound, for slow machines)."""
    box = daemon.create(runtime="container")
    box.run("import socket, time")
    ran = box.run("""
import socket, time
start = time.monotonic()
try:
    socket.create_connection(("example.com", 443), 60)
except socket.gaierror:
    print(time.monotonic() - start)
raise SystemExit(1)
""")  # of a command that failed every refusal until its end is told
    assert float(ran["stdout"]) < 1.0
    assert [item["name"] for item in ran["blocked"]] == ["example.com"]
    started = time.monotonic()
    ran = box.run("import socket\nsocket.create_connection(('192.0.2.77', 443), 60)")
    assert "ConnectionRefusedError" in ran["stderr"] and time.monotonic() - started < 30
    box.destroy()
