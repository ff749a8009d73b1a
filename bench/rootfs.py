"""Root file systems for peers, made of the machine's own programs: a bundle for OCI engines, an archive for podman."""

import json
import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from bench.lab import Lab
from bench.programs import find

DIRECTORIES = ("usr", "usr/bin", "usr/lib", "usr/lib64", "proc", "dev", "sys", "tmp", "etc", "run")
PROGRAMS = ("/usr/bin/dash", "/usr/bin/true", "/usr/bin/python3.11", "/usr/bin/python3", "/usr/bin/node")
TREES = ("/usr/lib/python3.11", "/usr/lib/python3/dist-packages/numpy")


def bundle(lab: Lab, argv: list[str], workspace: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """An OCI bundle on the machine's own /usr that runs one command; in `workspace`, as /workspace, if there is one."""
    path = lab.work / f"bundle-{len(list(lab.work.glob('bundle-*')))}"
    root = path / "rootfs"
    for name in ("usr", "proc", "dev", "sys", "tmp", "workspace", "etc/alternatives"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    subprocess.run([find("runc"), "spec"], cwd=path, check=True)
    config = json.loads((path / "config.json").read_text())
    config["process"].update(terminal=False, args=argv)
    for place in ("/usr", "/etc/alternatives"):
        options = ["bind", "ro", "nosuid"]
        config["mounts"].append({"destination": place, "source": place, "type": "bind", "options": options})
    if workspace is not None:
        config["process"]["cwd"] = "/workspace"
        where = {"destination": "/workspace", "source": str(workspace), "type": "bind", "options": ["bind", "rw"]}
        config["mounts"] += [
            where,
            {"destination": "/tmp", "source": "tmpfs", "type": "tmpfs", "options": ["mode=1777"]},
        ]
    if env is not None:
        config["process"]["env"] = [f"{name}={value}" for name, value in env.items()]
    (path / "config.json").write_text(json.dumps(config))
    return path


def archive(lab: Lab) -> Path:
    """A tar with a shell, Python, Node and numpy (what of them there is) and the libraries they load."""
    return lab.once("rootfs archive", lambda: _archive(lab.work / "rootfs.tar"))


def unpacked(lab: Lab) -> Path:
    def make() -> Path:
        path = lab.work / f"root-{lab.work.name}"
        path.mkdir()
        subprocess.run(["tar", "-C", str(path), "-xf", str(archive(lab))], check=True)
        return path

    return lab.once("rootfs directory", make)


def _archive(path: Path) -> Path:
    programs = [p for p in PROGRAMS if os.path.exists(p)]
    trees = [t for t in TREES if os.path.isdir(t)]
    shared = [str(f) for t in trees for f in Path(t).rglob("*.so")]
    with tarfile.open(path, "w") as tar:
        for name in DIRECTORIES:
            tar.addfile(_entry(name, tarfile.DIRTYPE))
        for name in ("bin", "lib", "lib64"):
            tar.addfile(_entry(name, tarfile.SYMTYPE, f"usr/{name}"))
        tar.addfile(_entry("usr/bin/sh", tarfile.SYMTYPE, "dash"))
        for tree in trees:
            tar.add(tree, tree[1:])
        tar.dereference = True
        for file in sorted({*programs, *_libraries([*programs, *shared])}):
            tar.add(file, (file if file.startswith("/usr/") else f"/usr{file}")[1:])
    return path


def _libraries(files: list[str]) -> set[str]:
    said = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout
    words = (word for line in said.splitlines() if not line.endswith(":") for word in line.split())
    return {word for word in words if word.startswith("/") and os.path.exists(word)}


def _entry(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = kind, target, 0o755
    return entry
