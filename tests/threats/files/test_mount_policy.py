"""FIL-11: what may be mounted at all. State, keys and the machine itself never."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from lab.sandboxes import Lab

from atoll import errors

FORBIDDEN = ["/", "/etc", "/home", "/usr", "/var", "/boot", "/dev", "/proc", "/run", "/sys", "/proc/self", "/sys/kernel", "/dev/shm",
             "/run/atoll", "/dev/null"]  # fmt: skip


@pytest.mark.parametrize("source", FORBIDDEN)
def test_the_machine_itself_is_refused(lab: Lab, runtime: str, source: str) -> None:
    """By name and behind a link, even for root's own daemon."""
    link = Path("/tmp") / f"atoll-link-{os.getpid()}-{os.urandom(3).hex()}"
    link.symlink_to(source)
    try:
        for name in (source, str(link), source + "/", source + "/."):
            with pytest.raises(errors.AtollError):
                lab.create(runtime=runtime, mounts=[{"source": name, "target": "/data"}])
    finally:
        link.unlink()


def test_state_is_refused_and_masked(lab: Lab, runtime: str) -> None:
    """The home of the daemon, parts of it, and the same inside a directory that may be mounted."""
    lab.start()
    for source in (
        lab.home,
        f"{lab.home}/boxes",
        f"{lab.home}/atoll.db",
        f"{lab.home}/../{os.path.basename(lab.home)}",
    ):
        with pytest.raises(errors.AtollError):
            lab.create(runtime=runtime, mounts=[{"source": source, "target": "/data"}])
    project = Path("/tmp") / f"atoll-project-{os.getpid()}-{os.urandom(3).hex()}"
    (project / ".atoll").mkdir(parents=True)
    (project / ".k8e").mkdir()
    (project / ".atoll" / "key").write_text("secret")
    (project / "plain").write_text("seen")
    try:
        with lab.sandbox(runtime=runtime, mounts=[{"source": str(project), "target": "/data"}]) as made:
            assert made.exec("cat /data/plain").stdout == "seen"  # control: the rest of the directory is there
            assert made.exec("cat /data/.atoll/key; ls -A /data/.k8e /data/.atoll | grep -v :").stdout.strip() == ""
    finally:
        shutil.rmtree(project)


def test_targets_cannot_cover_what_is_ours(lab: Lab, runtime: str) -> None:
    """Not the agent, not the kernel's file systems, not the root."""
    for target in ("/", "/proc", "/proc/sys", "/dev", "/sys/fs", "/.atoll", "/.atoll/guest", "relative", "/a/../../b"):
        with pytest.raises(errors.AtollError):
            lab.create(runtime=runtime, mounts=[{"source": "/tmp", "target": target}])


def test_git_takes_no_configuration_from_elsewhere(lab: Lab, runtime: str) -> None:
    """A new `.git/commondir` would make git on the host run what a file of the sandbox says: nothing in `.git` is writable."""
    project = Path("/tmp") / f"atoll-project-{os.getpid()}-{os.urandom(3).hex()}"
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    attack = (
        "mkdir -p /data/evil/objects /data/evil/refs; echo ref: refs/heads/x > /data/evil/HEAD; "
        f"printf '[core]\\n\\tfsmonitor = touch {project}/ran #\\n' > /data/evil/config; "
        "echo ../evil > /data/.git/commondir; mv /data/.git /data/x; rm -rf /data/.git/config; echo done"
    )
    try:
        with lab.sandbox(runtime=runtime, mounts=[{"source": str(project), "target": "/data"}]) as made:
            assert made.exec(attack).stdout == "done\n"
        assert (project / "evil" / "config").exists() and not (project / ".git" / "commondir").exists()
        subprocess.run(["git", "-C", str(project), "status"], capture_output=True, timeout=60)
        assert not (project / "ran").exists()
        (project / ".git" / "commondir").write_text("../evil\n")  # control: with that file, git does run it
        subprocess.run(["git", "-C", str(project), "status"], capture_output=True, timeout=60)
        assert (project / "ran").exists()
    finally:
        shutil.rmtree(project)
