"""Make images without a registry: a directory becomes an OCI archive of one layer."""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

from binaries import DEBIAN, run

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def pack(name: str, root: Path, archive: Path, command: list[str]) -> None:
    """Write the image `name` with the content of `root` to the tar file `archive`."""
    work = archive.with_suffix(".oci")
    shutil.rmtree(work, ignore_errors=True)
    blobs = work / "blobs/sha256"
    blobs.mkdir(parents=True)

    def add_blob(kind: str, path: Path) -> dict[str, object]:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        path.rename(blobs / digest)
        kind = f"application/vnd.oci.image.{kind}"
        return {"mediaType": kind, "size": size, "digest": f"sha256:{digest}"}

    def add_document(kind: str, value: object) -> dict[str, object]:
        (work / "document").write_text(json.dumps(value))
        return add_blob(kind, work / "document")

    with tarfile.open(work / "layer", "w") as tar:
        tar.add(root, ".")
    layer = add_blob("layer.v1.tar", work / "layer")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    described = add_document("config.v1+json", config)
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": [layer]}
    named = add_document("manifest.v1+json", manifest)
    named["annotations"] = {"io.containerd.image.name": name}
    (work / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    (work / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    with tarfile.open(archive, "w") as tar:
        for item in sorted(work.iterdir()):
            tar.add(item, item.name)
    shutil.rmtree(work)


def busybox(archive: Path) -> Path:
    """Make the image of every pod's first container, which is also a shell for tests."""
    if not archive.exists():
        root = archive.with_suffix(".root")
        for folder in ("bin", "tmp", "etc", "proc", "sys", "dev"):
            (root / folder).mkdir(parents=True)
        shutil.copy2("/bin/busybox", root / "bin/busybox")
        for applet in run(root / "bin/busybox", "--list").split():
            if applet != "busybox":
                (root / "bin" / applet).symlink_to("busybox")
        pack("atoll.test/busybox:1", root, archive, ["/bin/sleep", "2147483647"])
        shutil.rmtree(root)
    return archive


def debian(archive: Path) -> Path:
    """Make the image `atoll.test/debian:1`, in which sandboxes of tests start."""
    if not archive.exists():
        pack("atoll.test/debian:1", DEBIAN, archive, ["/bin/sh"])
    return archive
