"""A node of the cluster: a network, mount and process namespace with a /var and /run of its own.

Bridges, routes, firewall rules, mounts and processes of a node go away with its first process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import images
from binaries import BIN, run
from control_plane import (
    ADMIN,
    BRIDGE,
    CONTROL_GROUP,
    HOST,
    PKI,
    SERVICES,
    kubectl,
    make_certificate,
    write_flags,
    write_kubeconfig,
)
from processes import (
    LOGS,
    STATE,
    child_of,
    make_control_groups,
    record,
    recorded,
    remove_control_groups,
    start,
    wait_for,
)

CONTAINERD = """version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "atoll.test/busybox:1"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runsc]
  runtime_type = "io.containerd.runsc.v1"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runsc.options]
  TypeUrl = "io.containerd.runsc.v1.options"
  ConfigPath = "{folder}/runsc.toml"
"""
# kubelet insists on these. A plain file with the value is laid over each, inside the node alone, so
# that the machine's own settings stay as they are.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
# The first process of a node. Its arguments: the directory that becomes /var, then the settings.
INIT = """set -e
mount --bind "$1" /var
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/kernel
shift
for pair in "$@"; do
  file=/run/kernel/$(echo "${pair%%=*}" | tr / .)
  echo "${pair#*=}" > "$file"
  mount --bind "$file" "/proc/sys/${pair%%=*}"
done
mount --make-rshared /
ip link set lo up
: > /var/booted
while :; do sleep 3600 & wait $!; done
"""


class Node:
    """One node, by its number; its files are below the state directory."""

    def __init__(self, number: int) -> None:
        self.number, self.name, self.folder = number, f"n{number}", STATE / f"n{number}"
        self.address, self.pods = f"10.93.0.{10 + number}", f"10.94.{number}.0/24"

    def pid(self) -> int:
        return recorded(f"{self.name}-node") or sys.exit(f"node {self.name} is not running")

    def run_inside(self, *words: object) -> str:
        env = {**os.environ, "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"}
        join = ["nsenter", "--target", self.pid(), "--mount", "--net", "--pid", "--"]
        return run(*join, *words, env=env)

    def boot(self, peers: list["Node"]) -> None:
        """Make the namespaces and connect them with the bridge."""
        booted = self.folder / "var" / "booted"
        if not self.folder.exists():
            self.configure()
        booted.unlink(missing_ok=True)
        # A power cut leaves no control groups, and kubelet takes a minute over old ones.
        remove_control_groups(f"{CONTROL_GROUP}/{self.name}")
        make_control_groups(f"{CONTROL_GROUP}/{self.name}")
        self.start_init()
        wait_for(self.name, booted.exists)
        link = f"{BRIDGE}-{self.name}"
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.pid())
        run("ip", "link", "set", link, "master", BRIDGE, "up")
        self.run_inside("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run_inside("ip", "link", "set", "eth0", "up")
        # There is no default route: nothing leads out of the cluster.
        self.run_inside("ip", "route", "add", SERVICES, "via", HOST)
        for peer in peers:
            if peer.number != self.number:
                self.run_inside("ip", "route", "add", peer.pods, "via", peer.address)
        run("ip", "route", "replace", self.pods, "via", self.address)

    def start_init(self) -> None:
        settings = [f"{key}={value}" for key, value in KERNEL_SETTINGS.items()]
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = [*unshare, "bash", "-c", INIT, f"atoll-{self.name}", str(self.folder / "var"), *settings]
        with open(LOGS / f"{self.name}-node.log", "ab") as log:
            outer = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(self.name, lambda: child_of(outer.pid))
        record(f"{self.name}-node", child_of(outer.pid))

    def configure(self) -> None:
        for folder in ("var/lib", "var/log", "var/tmp", "cni"):
            (self.folder / folder).mkdir(parents=True)
        (self.folder / "var/run").symlink_to("/run")
        (self.folder / "containerd.toml").write_text(CONTAINERD.format(folder=self.folder))
        (self.folder / "runsc.toml").write_text('[runsc_config]\n  platform = "systrap"\n')
        self.write_json("cni/10-bridge.conflist", self.describe_network())
        make_certificate(self.name, f"/O=system:nodes/CN=system:node:{self.name}")
        write_kubeconfig(self.folder / "kubeconfig", self.name)
        self.write_json("kubelet.json", self.describe_kubelet())

    def write_json(self, name: str, value: object) -> None:
        (self.folder / name).write_text(json.dumps(value))

    def describe_network(self) -> dict[str, object]:
        ipam = {"type": "host-local", "subnet": self.pods, "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": ipam}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}

    def describe_kubelet(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(PKI / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{CONTROL_GROUP}/{self.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": ["none"],
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "volumePluginDir": "/var/lib/kubelet/volumeplugins",
            "resolvConf": "",
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8,
        }

    def start(self, program: str) -> None:
        flags: dict[str, dict[str, object]] = {
            "containerd": {"config": self.folder / "containerd.toml"},
            "kubelet": {
                "config": self.folder / "kubelet.json",
                "kubeconfig": self.folder / "kubeconfig",
                "hostname_override": self.name,
                "node_ip": self.address,
            },
            "kube-proxy": {
                "kubeconfig": ADMIN,
                "hostname_override": self.name,
                "proxy_mode": "iptables",
                "conntrack_max_per_core": 0,
                "conntrack_tcp_timeout_established": 0,
                "conntrack_tcp_timeout_close_wait": 0,
            },
            "kube-netpol": {
                "kubeconfig": ADMIN,
                "hostname_override": self.name,
                "service_cluster_ip_range": SERVICES,
            },
        }
        words = write_flags(flags[program])
        start(f"{self.name}-{program}", BIN / program, *words, inside=self.pid())

    def load(self, archive: Path) -> None:
        """Import an image into the node's containerd."""
        self.run_inside("ctr", "--namespace", "k8s.io", "images", "import", archive)


def nodes() -> list[Node]:
    return [Node(int(path.name[1:])) for path in sorted(STATE.glob("n[0-9]*"))]


def boot(node: Node, peers: list[Node]) -> None:
    """Start a node and its programs, or bring back what is missing of them."""
    if not recorded(f"{node.name}-node"):
        node.boot(peers)
    node.start("containerd")
    socket = Path(f"/proc/{node.pid()}/root/run/containerd/containerd.sock")
    wait_for("containerd", socket.exists)
    node.load(images.busybox(STATE / "busybox.tar"))
    node.load(images.debian(STATE / "debian.tar"))
    node.start("kubelet")
    node.start("kube-proxy")
    wait_for(
        f"node {node.name}",
        lambda: kubectl("get", "node", node.name, "-o", "name", check=False),
    )
    node.start("kube-netpol")  # it looks its node up once, and ends if there is none yet
