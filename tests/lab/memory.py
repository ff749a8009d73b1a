"""Whether the gVisor of this machine can save memory: builds from 2026 on, whose `restore` has more options."""

import shutil
import subprocess

import pytest


def _saves() -> bool:
    program = shutil.which("runsc")
    if program is None:
        return False
    said = subprocess.run([program, "help", "restore"], capture_output=True, text=True, timeout=60)
    return "fs-restore-image-path" in said.stdout + said.stderr


gvisor_saves = pytest.mark.skipif(not _saves(), reason="there is no gVisor of 2026, which saves memory")
