"""The test cluster as tests use it: kubectl, faults of its nodes, and pools installed by the chart.

`make test-kubernetes` starts the cluster and names its script in ATOLL_TEST_CLUSTER.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.backends.kubernetes import Settings
from atoll.backends.kubernetes.agents import Agents
from atoll.backends.local.binaries import guest
from lab.waiting import until

SCRIPT = os.environ.get("ATOLL_TEST_CLUSTER", "")
CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "atoll"
NAMESPACE = "sandbox-matrix"
IMAGE = "atoll.test/debian:1"
AGENT_IMAGE = "atoll.test/agent:1"
GATEWAY = "10.93.0.1/32"  # this machine, as pods see it
RUNTIMES = {"container": "", "gvisor": "gvisor"}  # runtime: RuntimeClass
WARM = 2
WHY_NOT = "needs the test cluster: make test-kubernetes"


def need_cluster() -> None:
    """Skip the test where no cluster was started for it."""
    if not SCRIPT:
        pytest.skip(WHY_NOT)


class TestCluster:
    """A running cluster with one namespace of pools, all of which know one gateway's key."""

    __test__ = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key_file = directory / "kubernetes.key"
        self.kubeconfig = directory / "kubeconfig"
        write_key(self.key_file)

    # What it is asked

    def kubectl(self, *words: str, check: bool = True, **options: Any) -> str:
        done = subprocess.run(["kubectl", "--namespace", NAMESPACE, *words], text=True, capture_output=True, **options)
        assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def get(self, kind: str, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *words, "-o", "json"))["items"]
        return found

    def claims(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.get("sandboxclaims")]

    def claimed_pods(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.get("pods", "-l", "agents.x-k8s.io/claim-uid")]

    def nothing_left(self) -> bool:
        """Nothing is there but what belongs to the pools."""
        return not self.claims() and not self.claimed_pods()

    def settings(self, **fields: Any) -> Settings:
        base = {"key_file": self.key_file, "namespace": NAMESPACE, "kubeconfig": str(self.kubeconfig)}
        return Settings(**{**base, "start_s": 240.0, **fields})

    # Faults

    def script(self, *words: str) -> None:
        done = subprocess.run(["/usr/bin/python3", SCRIPT, *words], text=True, capture_output=True)
        assert done.returncode == 0, done.stderr

    @contextmanager
    def without(self, program: str, *nodes: str) -> Iterator[None]:
        """End a program of each node inside the block, and start it again afterwards."""
        for node in nodes:
            self.script("kill", program, node)
        try:
            yield
        finally:
            for node in nodes:
                self.script("start", program, node)

    def nodes(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.get("nodes")]

    # Pools

    def processes_of(self, pod_uid: str, program: str) -> list[int]:
        """Return the processes of this machine that are in a pod's control group and run a program."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                mine = pod_uid in (process / "cgroup").read_text()
                if mine and program in (process / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(process.name))
            except OSError:
                continue
        return found

    def load_agent(self) -> None:
        """Load the image that brings the agent, with nothing in it but the agent."""
        root = self.directory / "agent-image"
        root.mkdir()
        shutil.copy2(guest().with_name("atoll-guest-pod"), root / "atoll-guest-pod")
        self.script("image", AGENT_IMAGE, str(root))

    def install(self) -> None:
        """Install the chart with a pool for each runtime, and wait until the pools are full."""
        self.kubectl("create", "namespace", NAMESPACE)
        self.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=baseline")
        self.load_agent()
        pools = [self.pool(name, name, runtime_class) for name, runtime_class in RUNTIMES.items()]
        self.upgrade(pools)
        self.write_kubeconfig()
        until(lambda: all(self.ready(name) == WARM for name in RUNTIMES), "the pools are full")

    def write_kubeconfig(self) -> None:
        """Write the gateway's own credentials: those of its service account, with the chart's rights alone."""
        admin = json.loads(self.kubectl("config", "view", "--raw", "-o", "json"))
        token = self.kubectl("create", "token", "atoll-gateway", "--duration", "4h")
        admin["users"] = [{"name": admin["users"][0]["name"], "user": {"token": token}}]
        self.kubeconfig.write_text(json.dumps(admin))

    def upgrade(self, pools: list[dict[str, Any]]) -> None:
        """Make the namespace's pools these, as an operator does."""
        values = {
            "agent": {"image": AGENT_IMAGE, "imagePullPolicy": "Never"},
            "gateway": {"keys": [Agents.load(self.key_file).public_key], "from": [{"ipBlock": {"cidr": GATEWAY}}]},
            "pools": pools,
        }
        file = self.directory / "values.json"
        file.write_text(json.dumps(values))
        render = ["helm", "template", "atoll", str(CHART), "--values", str(file), "--namespace", NAMESPACE]
        done = subprocess.run(render, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=done.stdout)
        wanted = {pool["name"] for pool in pools}
        for old in [one["metadata"]["name"] for one in self.get("sandboxwarmpools")]:
            if old not in wanted:
                self.kubectl("delete", "sandboxwarmpool,sandboxtemplate", old)

    def pool(self, name: str, runtime: str, runtime_class: str, **fields: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "name": name,
            "runtime": runtime,
            "image": IMAGE,
            "default": True,
            "imagePullPolicy": "Never",
            "replicas": WARM,
            "cpus": 1,
            "memoryMb": 256,
            "shmMb": 256,
            "diskMb": 256,
        }
        if runtime_class:
            base["runtimeClassName"] = runtime_class
        return {**base, **fields}

    def ready(self, pool: str) -> int:
        found = [one for one in self.get("sandboxwarmpools") if one["metadata"]["name"] == pool]
        return int(found[0].get("status", {}).get("readyReplicas", 0)) if found else 0


def write_key(path: Path) -> None:
    """Write a gateway's private key."""
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(text)
    path.chmod(0o600)
