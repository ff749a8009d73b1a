"""ESC-01: descriptors of the host that leak, and a working directory that leads through one (CVE-2024-21626)."""

import os
import subprocess

import pytest
from lab.sandboxes import Lab

from atoll import Sandbox, errors
from atoll.images.image import check_workdir

MAGIC = [f"/proc/self/fd/{n}" for n in range(3, 32)] + [
    "/proc/1/cwd",
    "/proc/1/root",
    "/proc/self/fd/7/../../etc",
    "/proc/thread-self/fd/8",
]


def test_the_attack_works_where_a_descriptor_leaks(tmp_path: object) -> None:
    """Control: a plain child that inherits a directory reaches it through its number."""
    held = os.open("/etc", os.O_RDONLY)
    try:
        done = subprocess.run(
            ["cat", "passwd"], cwd=f"/proc/self/fd/{held}", pass_fds=(held,), capture_output=True, timeout=60
        )
    finally:
        os.close(held)
    assert done.stdout.startswith(b"root:")


def test_a_working_directory_through_a_descriptor_is_refused(anywhere: Sandbox) -> None:
    """By exec, for every number a runtime could have left open, and for the agent's own places."""
    for place in MAGIC:
        with pytest.raises(errors.AtollError):
            anywhere.exec(["pwd"], cwd=place)
    anywhere.exec("ln -sfn /proc/self/fd/7 /workspace/door; ln -sfn /proc/1/root /workspace/other")
    for place in ("/workspace/door", "/workspace/other"):
        with pytest.raises(errors.AtollError):
            anywhere.exec(["pwd"], cwd=place)
    assert anywhere.exec(["pwd"], cwd="/usr/../workspace").stdout == "/workspace\n"


def test_a_new_sandbox_cannot_start_in_one(lab: Lab, runtime: str) -> None:
    """By create, and by what an image names."""
    for place in ("/proc/self/fd/7", "/proc/self/fd/9/..", "/proc/1/cwd"):
        try:
            made = lab.create(runtime=runtime, workdir=place)
        except errors.AtollError:
            continue
        with made, pytest.raises(errors.AtollError):  # created, then each command is refused
            made.exec("pwd")
    for place in ("/proc/self/fd/7", "/proc/self/fd/7/", "/proc/../proc/self/fd/8", "/dev/fd/8", "relative/../.."):
        assert not check_or_refuse(place).startswith(("/proc", "/dev", "..")), place


def check_or_refuse(place: str) -> str:
    try:
        return check_workdir(place)
    except errors.AtollError:
        return "/"


def test_a_fresh_process_has_three_descriptors(anywhere: Sandbox) -> None:
    """0, 1, 2 and the directory being listed; also on a terminal and in the background."""
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:3], len(os.listdir('/proc/self/fd')))"
    assert anywhere.run(code).stdout == "[0, 1, 2] 4\n"
    assert anywhere.start(["python3", "-c", code]).wait().stdout == "[0, 1, 2] 4\n"
    with anywhere.pty(["python3", "-c", code]) as terminal:
        assert b"".join(terminal).strip() == b"[0, 1, 2] 4"
