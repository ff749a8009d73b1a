"""The same router and broker without root: everything inside a user namespace of an ordinary user."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lab.internet import DNS_SERVER, World

USER = 64322
SCRIPT = r"""
import asyncio, os, socket, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from lab.internet import Inside, new_net
from atoll.egress import Egress, EgressPolicy

class Rootless:
    pass

async def main():
    egress = await Egress.start(sys.argv[3], None, servers=[(sys.argv[4], 53)], hosts_file="")
    with open(f"/proc/{egress.broker_pid}/status") as handle:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in handle if ":\t" in line)
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0, status
    net = new_net()
    link = await egress.attach("box", net, EgressPolicy.of(["a.example"]))
    world = Rootless()
    world.egress = egress
    box = Inside(world, "box", net, link)
    work = asyncio.to_thread
    assert await work(box.ask, "a.example") == (0, ["203.0.113.10"])
    assert await work(box.ask, "evil.example") == (3, [])
    sock = await work(box.connect, "a.example", 80)
    sock.sendall(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
    assert b"200 OK" in await work(sock.recv, 4096)
    try:
        await work(box.connect, "203.0.113.20", 443)
    except ConnectionRefusedError:
        pass
    else:
        raise SystemExit("a raw address was reached")
    await work(box.event, "raw addresses")
    await egress.detach("box")
    await egress.close()
    print("rootless works")

asyncio.run(main())
"""


def readable_by_others(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o005 for parent in (path, *path.parents))


@pytest.mark.skipif(not shutil.which("setpriv") or not shutil.which("unshare"), reason="needs util-linux")
def test_rootless_egress_holds(world: World) -> None:
    """Start, attach, allow, refuse and log as an ordinary user."""
    here, source = Path(__file__).parents[1], Path(__file__).parents[2] / "src"
    if not all(
        readable_by_others(path)
        for path in (here, source, Path(sys.executable).parent, Path(os.path.realpath(sys.executable)))
    ):
        pytest.skip("the code is not readable by an ordinary user here")
    world.inet.records["a.example"] = ["203.0.113.10"]
    state = world.directory / "rootless"
    state.mkdir()
    os.chown(state, USER, USER)
    words = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{world.host}"]
    words += ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    words += ["unshare", "--user", "--map-root-user"]
    usable = subprocess.run([*words, "--net", "true"], capture_output=True, check=False)
    if usable.returncode != 0:
        pytest.skip(f"no unprivileged user namespaces here: {usable.stderr.decode()}")
    done = subprocess.run(
        [*words, sys.executable, "-c", SCRIPT, str(here), str(source), str(state), DNS_SERVER],
        capture_output=True,
        timeout=120,
        check=False,
        cwd="/",
    )
    log = state / "broker.log"
    assert done.stdout == b"rootless works\n", (
        done.stderr.decode()[-2000:],
        log.read_text()[-2000:] if log.exists() else "",
    )
