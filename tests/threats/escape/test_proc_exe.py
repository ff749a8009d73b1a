"""ESC-02: overwriting the program that the host runs, through /proc/self/exe (CVE-2019-5736)."""

import hashlib
import shutil
import subprocess
from pathlib import Path

from atoll import Sandbox
from atoll.backends.local import binaries

# What an attacker does with each process that may be running a program of the host: open it for writing by every name,
# and by a descriptor kept from before the program was replaced.
OVERWRITE = """
import os
tried = 0
for pid in ['self', '1', *[p for p in os.listdir('/proc') if p.isdigit()]]:
    try:
        if os.readlink(f'/proc/{pid}/exe').startswith(('/usr/', '/bin/')): continue  # its own programs it may break
    except OSError: pass
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        try:
            kept = os.open(f'/proc/{pid}/exe', os.O_PATH)
            fd = os.open(f'/proc/self/fd/{kept}', flags)
        except OSError:
            continue
        tried += 1
for path in ('/.atoll/guest',):
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
        try:
            os.write(os.open(path, flags), b'x'); tried += 1
        except OSError:
            pass
    for act in (lambda: os.remove(path), lambda: os.rename(path, path + '2'), lambda: os.chmod(path, 0o777)):
        try:
            act(); tried += 1
        except OSError:
            pass
print(tried)
"""


def fingerprints() -> dict[str, str]:
    programs = [str(binaries.guest()), str(binaries.launcher())]
    programs += [found for name in ("runc", "crun", "runsc") if (found := shutil.which(name))]
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in programs}


def test_host_programs_are_unchanged(anywhere: Sandbox) -> None:
    """Every way to write fails, an entry point that is a link to /proc/self/exe gains nothing, hashes stay."""
    before = fingerprints()
    assert anywhere.run(OVERWRITE).stdout == "0\n"
    anywhere.exec(
        "ln -sf /proc/self/exe /usr/bin/trap; printf '#!/proc/self/exe\\n' > /usr/bin/bait; chmod +x /usr/bin/bait"
    )
    watcher = anywhere.start(["python3", "-c", f"import time\nfor _ in range(50):\n    exec({OVERWRITE!r})\n"])
    for _ in range(10):  # the host starts programs inside while the attacker opens whatever runs
        anywhere.exec(["/usr/bin/trap", "--version"], timeout=5)
        anywhere.exec(["/usr/bin/bait"], timeout=5)
        anywhere.exec("true")
    watcher.kill()
    assert set(watcher.wait().stdout.split()) <= {"0"}
    assert fingerprints() == before
    assert anywhere.exec("echo works").stdout == "works\n"


def test_the_attack_works_without_the_wall(tmp_path: Path) -> None:
    """Control: a program that is a plain file of the same user is overwritten by the same means once it has ended."""
    copy = tmp_path / "sleep"
    shutil.copy("/bin/sleep", copy)
    code = (
        "import os, subprocess, sys\np = subprocess.Popen([sys.argv[1], '60'])\n"
        "while os.readlink(f'/proc/{p.pid}/exe') != sys.argv[1]: pass\n"
        "kept = os.open(f'/proc/{p.pid}/exe', os.O_PATH)\np.kill(); p.wait()\n"
        "os.write(os.open(f'/proc/self/fd/{kept}', os.O_WRONLY), b'#!/bin/sh')\n"
    )
    subprocess.run(["/usr/bin/python3", "-c", code, str(copy)], check=True, timeout=60)
    assert copy.read_bytes().startswith(b"#!/bin/sh")
