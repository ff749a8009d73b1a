"""What an operator is told by `atoll kubernetes`, with the gateway's own rights on the real cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.contract import PlaceInCluster
from lab.kubernetes import AGENT_IMAGE, GATEWAY, NAMESPACE, RUNTIMES
from lab.waiting import until

pytestmark = pytest.mark.kubernetes

UNMANAGED = '{"spec": {"networkPolicyManagement": "Unmanaged"}}'


def atoll(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "import sys; from atoll.cli import main; sys.exit(main())"]
    env = {**os.environ, "ATOLL_HOME": str(home)}
    return subprocess.run([*program, "kubernetes", *words], env=env, text=True, capture_output=True)


@pytest.fixture
def home(runc: PlaceInCluster, tmp_path: Path) -> Path:
    """A gateway's home whose settings lead to the test cluster."""
    cluster = runc.cluster
    assert cluster is not None
    found = tmp_path / "operator"
    found.mkdir()
    config = f'[backend]\nkind = "kubernetes"\n[backend.kubernetes]\nkubeconfig = "{cluster.kubeconfig}"\n'
    (found / "config.toml").write_text(f'{config}key_file = "{cluster.key_file}"\n')
    return found


async def test_k8e_P49_status_shows_pools_and_the_sandboxes_of_this_gateway(runc: PlaceInCluster, home: Path) -> None:
    box = await runc.create()
    told = json.loads(atoll(home, "status", "--json").stdout)
    assert {pool["name"]: pool["runtime"] for pool in told["pools"]} == {name: name for name in RUNTIMES}
    assert told["namespace"] == NAMESPACE and not told["problems"] and told["runtime_classes"]["gvisor"] == "runsc"
    assert [one["id"] for one in told["sandboxes"]] == [box.id]
    assert told["sandboxes"][0]["pod"] == box.facts.shown["pod"]


async def test_doctor_names_what_is_wrong_and_how_it_is_mended(runc: PlaceInCluster, home: Path) -> None:
    cluster = runc.cluster
    assert cluster is not None
    good = atoll(home, "doctor")
    assert good.returncode == 0, good.stderr
    usual = [cluster.pool(name, name, kind) for name, kind in RUNTIMES.items()]
    cluster.upgrade([*usual, cluster.pool("kata", "kata", "no-such-class", replicas=0)])
    cluster.kubectl("patch", "sandboxtemplate", "kata", "--type=merge", "-p", UNMANAGED)
    try:
        bad = atoll(home, "doctor", "--json")
        problems = json.loads(bad.stdout)["problems"]
        assert bad.returncode == 1
        assert any("not managed" in one["what"] and one["where"].endswith("/kata") for one in problems)
        assert any("no-such-class" in one["what"] for one in problems) and all(one["fix"] for one in problems)
    finally:
        cluster.upgrade(usual)
    until(lambda: atoll(home, "doctor").returncode == 0, "the cluster is well again")


def test_a_cluster_that_is_away_or_empty_is_an_error_with_a_hint(home: Path, tmp_path: Path) -> None:
    config = (home / "config.toml").read_text()
    (home / "config.toml").write_text(config + 'namespace = "nothing-here"\n')
    told = json.loads(atoll(home, "doctor", "--json").stdout)
    assert not told["ok"] and "nothing-here" in told["problems"][0]["where"]
    (home / "config.toml").write_text(config.replace("kubeconfig = ", 'context = "none"\nkubeconfig = '))
    failed = atoll(home, "doctor")
    assert failed.returncode not in (0, 1) or "credentials" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_install_makes_the_key_and_pools_that_can_be_used(runc: PlaceInCluster, home: Path) -> None:
    """In a namespace of its own, which helm makes; again is no change. The operator has an administrator's rights."""
    cluster = runc.cluster
    assert cluster is not None
    key, namespace = home / "new.key", "installed"
    config = f'[backend]\nkind = "kubernetes"\n[backend.kubernetes]\nnamespace = "{namespace}"\n'
    (home / "config.toml").write_text(f'{config}key_file = "{key}"\n')
    values = {
        "agent": {"imagePullPolicy": "Never"},
        "gateway": {"from": [{"ipBlock": {"cidr": GATEWAY}}]},
        "pools": [cluster.pool("small", "container", "", replicas=1)],
    }
    (home / "values.json").write_text(json.dumps(values))
    words = ("install", str(home / "values.json"), "--agent-image", AGENT_IMAGE)
    try:
        printed = atoll(home, *words, "--print")
        assert printed.returncode == 0 and "kind: SandboxWarmPool" in printed.stdout, printed.stderr
        for _ in range(2):
            done = atoll(home, *words)
            assert done.returncode == 0, done.stderr
        assert key.stat().st_mode & 0o777 == 0o600
        assert atoll(home, "doctor").returncode == 0
        told = lambda: json.loads(atoll(home, "status", "--json").stdout)["pools"][0]["ready"] == 1  # noqa: E731
        until(told, "the pool is full")
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait=true")
