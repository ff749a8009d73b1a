#!/usr/bin/env python3
"""Run a real, small Kubernetes for tests: build it, start it, take it away again.

    cluster.py build            fetch and compile what is missing in the cache
    cluster.py packages         install the Debian packages that `build` needs
    cluster.py built            exit with 0 if nothing is missing
    cluster.py up [--nodes N]   start control plane, N nodes (default 2) and the controller
    cluster.py env              print shell lines that set KUBECONFIG and PATH
    cluster.py status           list the programs that run, with their memory, and the nodes
    cluster.py image NAME DIR   make an image of the directory DIR and load it on every node
    cluster.py kill WHAT NODE   end a program of a node, or all of it (WHAT is `node`)
    cluster.py start WHAT NODE  bring it back; a node returns with its disk, as after a power cut
    cluster.py down             stop everything and leave no trace

The programs of a node are kubelet, containerd, kube-proxy and kube-netpol. Needs root, Debian 12
or later and Go 1.26. What is built is kept in $ATOLL_K8S_CACHE (~/.cache/atoll-k8s), what runs in
$ATOLL_K8S_STATE (`state` in the cache).
"""

import os
import shutil
import signal
import sys
from pathlib import Path

sys.dont_write_bytecode = True
import control_plane  # noqa: E402
import images  # noqa: E402
from binaries import BIN, build, install_packages, missing, run, say  # noqa: E402
from control_plane import ADMIN, BRIDGE, CONTROL_GROUP, HOST, PKI, kubectl  # noqa: E402
from node import Node, boot, nodes  # noqa: E402
from processes import LOGS, PIDS, STATE, recorded, remove_control_groups, stop  # noqa: E402

RANGE = "10.92.0.0/14"  # holds the addresses of nodes, pods and services
VOLUMES = Path("/tmp/hostpath_pv")  # fixed by the controller manager's host-path provisioner


def up(count: int) -> None:
    build()
    if recorded("kube-apiserver"):
        say(f"already up; KUBECONFIG={ADMIN}")
        return
    down()
    if VOLUMES.exists():
        sys.exit(f"{VOLUMES} exists and is not ours: move it away, the cluster's volumes are made there")
    for folder in (PKI, LOGS, PIDS):
        folder.mkdir(parents=True)
    STATE.chmod(0o700)
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{HOST}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    run("ip", "route", "add", "unreachable", RANGE)  # no packet to a vanished pod leaves the machine
    say("control plane")
    control_plane.start_all()
    members = [Node(number + 1) for number in range(count)]
    for node in members:
        say(f"node {node.name}")
        boot(node, members)
    kubectl("wait", "--for=condition=Ready", "--timeout=60s", "node", "--all")
    kubectl("wait", "--for=create", "--timeout=30s", "serviceaccount/default")
    ended = [path.name for path in PIDS.iterdir() if not recorded(path.name)]
    if ended:
        sys.exit(f"ended early: {', '.join(ended)}; see {LOGS}")
    say("up")
    print(f"KUBECONFIG={ADMIN}")


def down() -> None:
    if not STATE.exists():
        return
    names = sorted(path.name for path in PIDS.glob("*")) if PIDS.exists() else []
    for name in names:
        if name.endswith("-node"):
            stop(name, signal.SIGKILL)  # the kernel ends every process of its namespace with it
    for name in control_plane.PROGRAMS:
        stop(name)
    run("ip", "link", "delete", BRIDGE, check=False)
    run("ip", "route", "delete", "unreachable", RANGE, check=False)
    remove_control_groups(CONTROL_GROUP)
    shutil.rmtree(VOLUMES, ignore_errors=True)
    shutil.rmtree(STATE)
    say("down")


def show_status() -> None:
    for path in sorted(PIDS.glob("*")) if PIDS.exists() else []:
        pid = recorded(path.name)
        print(f"{path.name:28} {pid or 'gone':>8} {resident_mb(pid):6} MB")
    print(kubectl("get", "nodes", "-o", "wide") if recorded("kube-apiserver") else "not running")


def resident_mb(pid: int) -> int:
    """Return the resident memory of a process; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")), 0)


def find_node(name: str) -> Node:
    return next((node for node in nodes() if node.name == name), None) or sys.exit(f"no node {name}")


def main(words: list[str]) -> None:
    if os.geteuid():
        sys.exit("cluster.py needs root")
    match words:
        case ["build"]:
            build()
        case ["packages"]:
            install_packages()
        case ["built"]:
            if names := missing():
                sys.exit(f"not built yet: {', '.join(names)}")
        case ["up"]:
            up(2)
        case ["up", "--nodes", count]:
            up(int(count))
        case ["down"]:
            down()
        case ["status"]:
            show_status()
        case ["env"]:
            print(f"export KUBECONFIG={ADMIN}\nexport PATH={BIN}:$PATH")
        case ["image", name, root]:
            images.pack(name, Path(root), STATE / "image.tar", ["/bin/sh"])
            for node in nodes():
                node.load(STATE / "image.tar")
        case ["kill", "node", name]:
            stop(f"{name}-node", signal.SIGKILL)
        case ["kill", program, name]:
            stop(f"{name}-{program}", signal.SIGKILL)
        case ["start", "node", name]:
            boot(find_node(name), nodes())
        case ["start", program, name]:
            find_node(name).start(program)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
