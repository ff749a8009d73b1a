"""A pod without a cluster: the agent as PID 1 of a process namespace, in a network of its own, and a gateway's network beside it."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import atoll
from atoll.backends.kubernetes.channel import AGENT, GatewayKey, dial, order
from atoll.egress.router.netlink import Netlink
from atoll.guest import GuestClient
from lab.internet import in_net, new_net, wait_for

PROGRAM = Path(os.environ.get("ATOLL_POD_AGENT") or Path(atoll.__file__).parent / "_bin" / "atoll-guest-pod")
GATEWAY, POD, PORT = "10.77.0.1", "10.77.0.2", 2024
CLAIM, POD_UID = "5f0c-claim", "77aa-pod"
T = TypeVar("T")


def can_run_pods() -> bool:
    return os.geteuid() == 0 and PROGRAM.exists() and bool(shutil.which("unshare"))


class Pod:
    """One agent. `key` is the gateway's whose public half it was started with."""

    def __init__(self, key: GatewayKey | None = None, *arguments: str) -> None:
        self.key = key or GatewayKey.generate()
        self.gateway_net, self.net = new_net(), new_net()
        self._join()
        self._directory = tempfile.TemporaryDirectory(prefix="atoll-pod-")
        resolv = Path(self._directory.name, "resolv.conf")
        resolv.write_text("nameserver 127.0.0.1\noptions timeout:5 attempts:3\n")
        start = f'mount --bind {resolv} "$(readlink -f /etc/resolv.conf)" && exec "$@"'
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", start, "sh"]
        command += [str(PROGRAM), "pod", "--gateway-key", self.key.public, *arguments]
        self.process = in_net(
            self.net, lambda: subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.fingerprint = self.line.split()[-1] if self.line else ""

    def _join(self) -> None:
        def gateway_side() -> None:
            with Netlink() as netlink:
                netlink.add_veth("pod0", "eth0", self.net)
                index = socket.if_nametoindex("pod0")
                netlink.add_address(index, GATEWAY, 24)
                netlink.set_up(index)

        def pod_side() -> None:
            with Netlink() as netlink:
                index = socket.if_nametoindex("eth0")
                netlink.add_address(index, POD, 24)
                netlink.set_up(index)

        in_net(self.gateway_net, gateway_side)
        in_net(self.net, pod_side)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._directory.cleanup()
        os.close(self.gateway_net)
        os.close(self.net)

    def ended(self) -> int:
        """Wait until the agent has ended, and return its exit status."""
        wait_for("end of the agent", lambda: self.process.poll() is not None)
        return self.process.returncode

    def inside(self, work: Callable[[], T]) -> T:
        """Act with sockets as a program of the pod does."""
        return in_net(self.net, work)

    def activation(self, **change: Any) -> dict[str, Any]:
        """An order that activates, with a canary that nothing answers."""
        boot = {
            "sandbox": "box",
            "host_secret": self.key.hello_secret(CLAIM, POD_UID, "host"),
            "agent_secret": self.key.hello_secret(CLAIM, POD_UID, "agent"),
            "env": {"PATH": "/usr/bin:/bin", "FROM_CLAIM": "yes"},
        }
        canaries = [{"host": GATEWAY, "port": 9}]
        value = {"op": "activate", "claim": CLAIM, "pod": POD_UID, "boot": boot, "canaries": canaries}
        return {**value, **change}

    async def order(self, value: dict[str, Any], key: GatewayKey | None = None) -> dict[str, Any]:
        return await order(key or self.key, POD, PORT, self.fingerprint, value)

    def client(self, claim: str = CLAIM) -> GuestClient:
        """The client of core, over the agent channel of this pod."""
        return GuestClient(
            lambda: dial(self.key, POD, PORT, self.fingerprint, AGENT),
            host_secret=self.key.hello_secret(claim, POD_UID, "host"),
            agent_secret=self.key.hello_secret(claim, POD_UID, "agent"),
        )

    def agent_pid(self) -> int:
        """The number of the agent's process on this machine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])
