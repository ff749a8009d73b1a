"""LIF-02: what was asked for is what holds, after every transition of a sandbox's life."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from lab.sandboxes import ROOTLESS, Lab, alive, group_values, until

from atoll import Sandbox

ASK: dict[str, Any] = {
    "memory_mb": 192,
    "pids": 77,
    "files": 333,
    "disk_mb": 48,
    "cpus": 0.5,
    "env": {"ASKED": "yes"},
    "read_only_root": True,
}
if ROOTLESS:
    del ASK["disk_mb"]  # it would be in memory, and end with a stop: tests/rootless
INSIDE = """
import json, os, resource, shutil, socket
def writable(p):
    try: open(p + '/probe', 'w').close(); os.remove(p + '/probe'); return True
    except OSError: return False
print(json.dumps({'files': resource.getrlimit(resource.RLIMIT_NOFILE), 'root': writable('/etc'), 'work': writable('/workspace'),
  'disk': shutil.disk_usage('/workspace').total <= 48 << 20, 'env': os.environ.get('ASKED'), 'uid': os.getuid(),
  'caps': [l for l in open('/proc/self/status').read().splitlines() if l.startswith(('CapBnd', 'NoNewPrivs', 'Seccomp:'))],
  'map': open('/proc/self/uid_map').read().split()[2], 'net': sorted(name for _, name in socket.if_nameindex()),
  'share': open('/data/name').read(), 'share writable': writable('/data')}))
"""


def group_value(lab: Lab, sandbox: str, *names: str) -> int:
    """The first of these files that has a number (v2 and v1 name them differently)."""
    for name in names:
        for text in group_values(lab.mark, sandbox, name):
            if text.split()[0].isdigit():
                return int(text.split()[0])
    raise AssertionError(f"no {names} for {sandbox}")


def applied(lab: Lab, sandbox: Sandbox) -> dict[str, Any]:
    inside = json.loads(sandbox.run(INSIDE).stdout)
    return {
        **inside,
        "memory": group_value(lab, sandbox.id, "memory.max", "memory.limit_in_bytes"),
        "pids": group_value(lab, sandbox.id, "pids.max"),
        "cpu": group_value(lab, sandbox.id, "cpu.max", "cpu.cfs_quota_us"),
        "info": {name: limit["value"] for name, limit in sandbox.info().limits.items()},
        "hosts": sandbox.info().hosts,
    }


def test_every_transition_keeps_every_part(own_lab: Lab, runtime: str) -> None:
    """Create, pause and resume, stop and start, a killed daemon, both together: the same walls each time."""
    share = Path("/tmp") / f"atoll-spec-{os.getpid()}-{os.urandom(3).hex()}"
    share.mkdir()
    (share / "name").write_text("shared")
    mounts = [{"source": str(share), "target": "/data", "read_only": True}]
    made = own_lab.create(runtime=runtime, mounts=mounts, **ASK)
    try:
        first = applied(own_lab, made)
        assert (first["memory"], first["pids"], first["cpu"]) == (192 << 20, 77, 50000) or first["pids"] >= 77
        assert (
            first["files"] == [333, 333]
            and not first["root"]
            and first["work"]
            and first["disk"] != ROOTLESS
            and first["env"] == "yes"
        )
        assert (
            (runtime == "gvisor" or first["map"] == ("1" if ROOTLESS else "65536"))
            and first["share"] == "shared"
            and not first["share writable"]
        )
        made.pause()
        made.resume()
        assert applied(own_lab, made) == first
        made.stop()
        made.restart()
        assert applied(own_lab, made) == first
        crash(own_lab)
        assert applied(own_lab, made) == first
        made.stop()
        crash(own_lab)
        made.restart()
        assert applied(own_lab, made) == first
        made.destroy()
    finally:
        made.destroy()
        made.close()
        (share / "name").unlink()
        share.rmdir()


def crash(lab: Lab) -> None:
    pid = lab.start()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "it is gone")
    lab.start()
