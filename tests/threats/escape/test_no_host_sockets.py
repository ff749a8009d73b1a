"""ESC-10: control sockets and processes of the host within reach."""

import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from lab.sandboxes import PATIENCE, Lab

from atoll import Sandbox, errors

SCAN = """
import json, os, socket, stat, sys
abstract, listening, pid = sys.argv[1], sys.argv[2], int(sys.argv[3])
found = {'sockets': [], 'abstract': False, 'path': False, 'pid': False, 'kill': False, 'environ': False}
for top, dirs, names in os.walk('/'):
    if top in ('/proc', '/sys'): dirs[:] = []
    for name in names:
        try:
            if stat.S_ISSOCK(os.lstat(os.path.join(top, name)).st_mode): found['sockets'].append(os.path.join(top, name))
        except OSError: pass
for key, address in (('abstract', '\\0' + abstract), ('path', listening)):
    try: socket.socket(socket.AF_UNIX).connect(address); found[key] = True
    except OSError: pass
found['unix'] = [line.split()[-1] for line in open('/proc/net/unix').read().splitlines()[1:] if '/' in line or '@' in line] \
    if os.path.exists('/proc/net/unix') else []
try: found['environ'] = 'canary' in open(f'/proc/{pid}/environ').read()
except OSError: pass
print(json.dumps(found))
"""


def test_nothing_of_the_host_answers(anywhere: Sandbox) -> None:
    """Sockets by path, in the abstract namespace and in the kernel's table; a host process and its environment."""
    import json

    name = f"atoll-abstract-{os.urandom(6).hex()}"
    with tempfile.TemporaryDirectory(prefix="atoll-sock-") as place, socket.socket(socket.AF_UNIX) as hidden:
        Path(place).chmod(0o777)
        hidden.bind(f"\0{name}")
        hidden.listen()
        with socket.socket(socket.AF_UNIX) as plain:
            plain.bind(f"{place}/s")
            plain.listen()
            os.chmod(f"{place}/s", 0o777)
            bystander = subprocess.Popen(["sleep", "600"], env={"CANARY": "canary"})
            try:
                words = ["-c", SCAN, name, f"{place}/s", str(bystander.pid)]
                outside = json.loads(
                    subprocess.run(
                        ["/usr/bin/python3", *words[:1], SCAN.replace("os.walk('/')", "()"), *words[2:]],
                        capture_output=True, check=True, timeout=PATIENCE,
                    ).stdout
                )  # fmt: skip
                inside = json.loads(anywhere.exec(["python3", *words], timeout=PATIENCE).stdout)
            finally:
                bystander.kill()
                bystander.wait(PATIENCE)
    assert outside["abstract"] and outside["path"] and outside["environ"]  # control: outside the same probe finds them
    assert not any(inside[key] for key in ("abstract", "path", "environ")), inside
    assert [path for path in inside["sockets"] if not path.startswith("/.atoll/")] == []
    assert not [path for path in inside["unix"] if "docker" in path or "systemd" in path or name in path]


def test_processes_are_its_own(anywhere: Sandbox) -> None:
    """Few pids, all of the sandbox; a signal to any number of the host's reaches nobody."""
    pids = anywhere.run("import os; print(*sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))").stdout.split()
    assert 0 < len(pids) < 20
    victim = subprocess.Popen(["sleep", "600"])
    try:
        assert str(victim.pid) not in pids
        anywhere.exec(f"kill -9 {victim.pid} {os.getpid()}")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait(PATIENCE)


def test_a_socket_cannot_be_mounted(lab: Lab, runtime: str) -> None:
    """Not by itself, and none of the machine's run directory."""
    with tempfile.TemporaryDirectory(prefix="atoll-sock-") as place, socket.socket(socket.AF_UNIX) as plain:
        plain.bind(f"{place}/s")
        for source in (f"{place}/s", "/run", "/run/atoll", "/var/run", "/proc/self/fd", f"{lab.home}/daemon.sock"):
            with pytest.raises(errors.AtollError):
                lab.create(runtime=runtime, mounts=[{"source": source, "target": "/data"}])
