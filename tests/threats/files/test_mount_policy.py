"""FIL-11: what may be mounted at all. State, keys and the machine itself never."""

import os
import shutil
from pathlib import Path

import pytest
from sandbox_lab import Lab

from atoll import errors

FORBIDDEN = ["/", "/etc", "/home", "/usr", "/var", "/boot", "/dev", "/proc", "/run", "/sys", "/proc/self", "/sys/kernel", "/dev/shm",
             "/run/atoll", "/dev/null"]  # fmt: skip


@pytest.mark.parametrize("source", FORBIDDEN)
def test_the_machine_itself_is_refused(lab: Lab, source: str) -> None:
    """By name and behind a link, even for root's own daemon."""
    link = Path("/tmp") / f"atoll-link-{os.getpid()}-{os.urandom(3).hex()}"
    link.symlink_to(source)
    try:
        for name in (source, str(link), source + "/", source + "/."):
            with pytest.raises(errors.AtollError):
                lab.create(runtime="container", mounts=[{"source": name, "target": "/data"}])
    finally:
        link.unlink()


def test_state_is_refused_and_masked(lab: Lab) -> None:
    """The home of the daemon, parts of it, and the same inside a directory that may be mounted."""
    lab.start()
    for source in (
        lab.home,
        f"{lab.home}/boxes",
        f"{lab.home}/atoll.db",
        f"{lab.home}/../{os.path.basename(lab.home)}",
    ):
        with pytest.raises(errors.AtollError):
            lab.create(runtime="container", mounts=[{"source": source, "target": "/data"}])
    project = Path("/tmp") / f"atoll-project-{os.getpid()}-{os.urandom(3).hex()}"
    (project / ".atoll").mkdir(parents=True)
    (project / ".k8e").mkdir()
    (project / ".atoll" / "key").write_text("secret")
    (project / "plain").write_text("seen")
    try:
        with lab.sandbox(runtime="container", mounts=[{"source": str(project), "target": "/data"}]) as made:
            assert made.exec("cat /data/plain").stdout == "seen"  # control: the rest of the directory is there
            assert made.exec("cat /data/.atoll/key; ls -A /data/.k8e /data/.atoll | grep -v :").stdout.strip() == ""
    finally:
        shutil.rmtree(project)


def test_targets_cannot_cover_what_is_ours(lab: Lab) -> None:
    """Not the agent, not the kernel's file systems, not the root."""
    for target in ("/", "/proc", "/proc/sys", "/dev", "/sys/fs", "/.atoll", "/.atoll/guest", "relative", "/a/../../b"):
        with pytest.raises(errors.AtollError):
            lab.create(runtime="container", mounts=[{"source": "/tmp", "target": target}])


def test_git_takes_no_configuration_from_elsewhere(lab: Lab) -> None:
    """Both files decide which configuration, and so which programs, git uses on the host."""
    project = Path("/tmp") / f"atoll-project-{os.getpid()}-{os.urandom(3).hex()}"
    (project / ".git").mkdir(parents=True)
    levers = [project / ".git" / name for name in ("commondir", "config.worktree")]
    for lever in levers:
        lever.write_text("mine\n")
    try:
        with lab.sandbox(runtime="container", mounts=[{"source": str(project), "target": "/data"}]) as made:
            made.exec("cd /data/.git; for f in commondir config.worktree; do echo evil > $f; rm -f $f; mv $f x; done")
            assert made.exec("echo fine > /data/.git/index && cat /data/.git/index").stdout == "fine\n"  # control
        assert [lever.read_text() for lever in levers] == ["mine\n", "mine\n"]
    finally:
        shutil.rmtree(project)
