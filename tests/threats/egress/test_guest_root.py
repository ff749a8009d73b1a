"""EGR-12: root inside a sandbox may do what it likes with its own side of the link; nothing widens."""

import os
import socket
import subprocess
import sys

import pytest
from lab.internet import World

from atoll.egress import EgressPolicy

ATTACK = r"""
import json, os, socket, subprocess, sys
gateway, address, victim = sys.argv[1:4]
def sh(*words):
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
sh("nft", "flush", "ruleset")
sh("ip", "addr", "add", victim + "/30", "dev", "eth0")
sh("ip", "addr", "add", "203.0.113.66/24", "dev", "eth0")
sh("ip", "link", "set", "eth0", "mtu", "1280")
sh("ip", "link", "set", "eth0", "address", "02:00:00:00:00:77")
sh("ip", "route", "replace", "default", "via", gateway)
sh("ip", "route", "add", "203.0.113.0/24", "via", gateway, "src", address)
sh("ip", "neigh", "flush", "all")
sh("ip", "link", "add", "link", "eth0", "name", "mv0", "type", "macvlan")
sh("ip", "link", "set", "mv0", "up")
for key in ("NO_PROXY", "no_proxy"):
    os.environ[key] = "*"
results = []
for source in (address, victim, "203.0.113.66"):
    for target in ("203.0.113.10", victim, gateway, "169.254.169.254", "127.0.0.1"):
        for port in (443, 80, 1, 22):
            s = socket.socket()
            s.settimeout(0.15)
            try:
                s.bind((source, 0))
                s.connect((target, port))
                results.append([source, target, port])
            except OSError:
                pass
            s.close()
json.dump(results, sys.stdout)
"""


def test_nothing_root_does_on_its_side_opens_anything(world: World) -> None:
    """Let root flush rules, take addresses, edit routes and make devices: every connection still fails."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as victim, world.sandbox() as box:
        victim.resolve("a.example")
        before = len(world.inet.dialled)
        words = [sys.executable, "-I", "-c", ATTACK, box.link.gateway, box.link.address, victim.link.address]
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{os.getpid()}/fd/{box.net}", *words], capture_output=True, timeout=120, check=True
        )
        assert done.stdout == b"[]", done.stdout
        assert len(world.inet.dialled) == before
        # The victim is untouched.
        with victim.tls("a.example") as tls:
            tls.sendall(b"x")
            assert tls.recv(10) == b"tls:x"


def test_namespace_owned_by_a_user_namespace_can_be_plugged(world: World) -> None:
    """Plug a namespace made inside a user namespace, as sandboxes are, and work there."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    child = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", "echo ready; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout and child.stdin
    try:
        assert child.stdout.readline() == b"ready\n"
        net = os.open(f"/proc/{child.pid}/ns/net", os.O_RDONLY)
        name = f"userns-{os.getpid()}"
        try:
            link = world.call(world.egress.attach(name, net, EgressPolicy.of(["a.example"])))
            code = (
                "import socket,sys\n"
                "q=b'\\x12\\x34\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\1a\\7example\\0\\0\\1\\0\\1'\n"
                "u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM);u.settimeout(30);u.sendto(q,(sys.argv[1],53))\n"
                "a=socket.inet_ntoa(u.recv(512)[-4:])\n"
                "t=socket.create_connection((a,80),30)\n"
                "t.sendall(b'GET / HTTP/1.1\\r\\nHost: a.example\\r\\n\\r\\n')\n"
                "print(a, b'200 OK' in t.recv(4096))\n"
            )
            enter = ["nsenter", f"--target={child.pid}", "--user", "--net", "--preserve-credentials"]
            done = subprocess.run(
                [*enter, sys.executable, "-I", "-c", code, link.gateway], capture_output=True, timeout=120
            )
            assert done.stdout.split() == [b"203.0.113.10", b"True"], done.stderr
        finally:
            world.call(world.egress.detach(name))
            os.close(net)
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()


def test_broker_has_no_rights(world: World) -> None:
    """Find the broker as another user, without capabilities and unable to gain any."""
    with open(f"/proc/{world.egress.broker_pid}/status", encoding="ascii") as handle:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in handle if ":\t" in line)
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"64321"}
    for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[field], 16) == 0, field
    assert status["NoNewPrivs"] == "1" and status.get("Groups", "").strip() == ""


def test_machine_is_left_as_it_was(world: World) -> None:
    """Change no rule and no forwarding in the machine's own namespace."""

    def forwarding() -> str:
        with open("/proc/sys/net/ipv4/ip_forward", encoding="ascii") as handle:
            return handle.read()

    before = forwarding()
    with world.sandbox() as box:
        assert box.link.ifname not in {name for _, name in socket.if_nameindex()}
        assert forwarding() == before
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("nft is not installed")
    assert b"inet atoll" not in listed.stdout
