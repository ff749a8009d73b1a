"""A whole gateway in front of the cluster: from the command line to a pod, and back after it was killed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.daemon import Box, DaemonProcess, Failed
from lab.kubernetes import TestCluster
from lab.waiting import until

pytestmark = pytest.mark.kubernetes

ROOM = "[sandboxes]\nruntime = 'container'\nidle_timeout_s = 0\n"


def gateway(cluster: TestCluster) -> DaemonProcess:
    """A daemon, not started, with the service account's rights. Its sandboxes are pods."""
    place = f'kubeconfig = "{cluster.kubeconfig}"\nkey_file = "{cluster.key_file}"\n'
    config = f'{ROOM}[backend]\nkind = "kubernetes"\n[backend.kubernetes]\n{place}unreachable_s = 60\n'
    return DaemonProcess(config)


@pytest.fixture
def cluster(test_cluster: TestCluster) -> Iterator[TestCluster]:
    yield test_cluster
    until(test_cluster.nothing_left, "nothing is left")


def create(daemon: DaemonProcess, name: str) -> Box:
    """Make a sandbox of the pool's own size."""
    return Box(daemon, daemon.post("/v1/sandboxes", {"name": name})["id"])


def cli(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "import sys; from atoll.cli import main; sys.exit(main())"]
    return subprocess.run(
        [*program, *words], env={**os.environ, "ATOLL_HOME": str(home)}, text=True, capture_output=True
    )


def test_the_command_line_runs_code_in_a_pod(cluster: TestCluster) -> None:
    """As the first page of the documentation ends; and what a pod cannot do is an error with a hint."""
    daemon = gateway(cluster)
    daemon.start()
    try:
        ran = cli(daemon.home, "sandbox", "run", "print('hello')", "--lang", "python")
        assert ran.returncode == 0, ran.stderr + ran.stdout
        assert json.loads(ran.stdout)["stdout"] == "hello\n"
        assert len(cluster.claims()) == 1 == len(cluster.claimed_pods())
        box = create(daemon, "kept")
        assert box.exec("echo $((6 * 7))")["stdout"] == "42\n"
        with pytest.raises(Failed) as refused:
            daemon.post(f"/v1/sandboxes/{box.id}/stop")
        assert refused.value.code == "unsupported"
        daemon.kill()
        daemon.start()
        assert box.exec("echo still here")["stdout"] == "still here\n"
    finally:
        daemon.close()
