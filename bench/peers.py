"""Peers that a user would pick instead: each peer runs one program in a place of its own. Each is tried once before it counts."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import rootfs
from bench.lab import Lab
from bench.programs import Unavailable, find, run

SANDBOX_RUNTIME = "@anthropic-ai/sandbox-runtime@0.0.83"
SANDBOX_RUNTIME_NEEDS = ("npm", "bwrap", "socat", "rg")
ULIMITS = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]  # podman's own defaults need a capability

Command = Callable[[list[str]], list[str]]


@dataclass(frozen=True)
class Peer:
    """A name, and from a program to the whole command line; or why there is none."""

    name: str
    command: Command | None
    why: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None

    def runner(self, argv: list[str]) -> Callable[[], object] | None:
        if self.command is None:
            return None
        command = self.command
        return lambda: run(command(argv), env=self.env, cwd=self.cwd)


def everyone(lab: Lab) -> list[Peer]:
    """All peers, those that do not work here with the reason."""
    return lab.once("peers", lambda: [_tried(lab, name, make) for name, make in MAKERS.items()])


def one(lab: Lab, name: str) -> Peer:
    return next(peer for peer in everyone(lab) if peer.name == name)


def _tried(lab: Lab, name: str, make: Callable[[Lab], Peer]) -> Peer:
    try:
        peer = make(lab)
        runner = peer.runner(["/bin/sh", "-c", "echo hello"])
        if runner is not None:
            runner()
        return peer
    except (Unavailable, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Peer(name, None, str(error)[:160])


def _bare(lab: Lab) -> Peer:
    return Peer("bare", lambda argv: argv)


def _bubblewrap(lab: Lab) -> Peer:
    binds = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"]
    binds += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    binds += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--unshare-all", "--die-with-parent", "--"]
    bwrap = find("bwrap")
    return Peer("bubblewrap", lambda argv: [bwrap, *binds, *argv])


def _firejail(lab: Lab) -> Peer:
    firejail = find("firejail")
    options = ["--quiet", "--noprofile", "--private", "--net=none", "--caps.drop=all", "--seccomp", "--nonewprivs"]
    return Peer("firejail", lambda argv: [firejail, *options, *argv])


def _nspawn(lab: Lab) -> Peer:
    nspawn, root = find("systemd-nspawn"), rootfs.unpacked(lab)
    options = ["--quiet", "--register=no", "--keep-unit", "--private-network", "--pipe"]
    lab.at_end(lambda: shutil.rmtree(f"/run/systemd/nspawn/propagate/{root.name}", ignore_errors=True))
    return Peer("systemd-nspawn", lambda argv: [nspawn, *options, "-D", str(root), *argv])


def _oci(name: str, engine: list[str]) -> Callable[[Lab], Peer]:
    def make(lab: Lab) -> Peer:
        program = [find(engine[0]), *engine[1:]]
        if engine[0] == "runsc":
            old = "2022" in subprocess.run([program[0], "--version"], capture_output=True, text=True).stdout
            program.insert(1, "--platform=ptrace" if old else "--platform=systrap")
        count = iter(range(1_000_000_000))

        def command(argv: list[str]) -> list[str]:
            bundle = lab.once(f"bundle {argv}", lambda: rootfs.bundle(lab, argv))
            return [*program, "run", "--bundle", str(bundle), f"atoll-bench-{os.getpid()}-{engine[0]}-{next(count)}"]

        return Peer(name, command)

    return make


def _podman(lab: Lab) -> Peer:
    podman, runc, place = find("podman"), find("runc"), lab.work / "podman"
    known = set(Path("/sys/fs/cgroup").glob("*/libpod_parent"))
    cache = Path("/var/lib/containers")  # podman keeps one there whatever it is told
    cached = cache.exists()
    base = [podman, "--root", f"{place}/root", "--runroot", f"{place}/run", "--tmpdir", f"{place}/tmp"]
    base += ["--runtime", runc]
    base += ["--cgroup-manager", "cgroupfs", "--events-backend", "file"]

    def clean() -> None:
        subprocess.run([*base, "rm", "--all", "--force"], capture_output=True)
        subprocess.run(["umount", "-l", f"{place}/root/overlay"], capture_output=True)
        if not cached:
            shutil.rmtree(cache, ignore_errors=True)
        for made in set(Path("/sys/fs/cgroup").glob("*/libpod_parent")) - known:
            for inner in (*made.glob("*"), made):
                if inner.is_dir():
                    try:
                        inner.rmdir()
                    except OSError:
                        continue

    lab.at_end(clean)
    run([*base, "import", str(rootfs.archive(lab)), "bench:1"])
    options = ["run", "--rm", "--network=none", *ULIMITS, "bench:1"]
    return Peer("podman run", lambda argv: [*base, *options, *argv])


def _sandbox_runtime(lab: Lab) -> Peer:
    for program in SANDBOX_RUNTIME_NEEDS:
        find(program)
    place = lab.work / "srt"
    place.mkdir()
    run([find("npm"), "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(place), SANDBOX_RUNTIME])
    srt = str(place / "node_modules" / ".bin" / "srt")
    return Peer(
        "sandbox-runtime",
        lambda argv: [srt, "-c", shlex.join(argv)],
        env={**os.environ, "HOME": str(place)},
        cwd=str(place),
    )


MAKERS: dict[str, Callable[[Lab], Peer]] = {
    "bare": _bare,
    "bubblewrap": _bubblewrap,
    "firejail": _firejail,
    "systemd-nspawn": _nspawn,
    "runc run": _oci("runc run", ["runc"]),
    "crun run": _oci("crun run", ["crun"]),
    "runsc run": _oci("runsc run", ["runsc", "--network=none", "--ignore-cgroups"]),
    "podman run": _podman,
    "sandbox-runtime": _sandbox_runtime,
}
