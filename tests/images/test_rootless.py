"""The same store inside a user namespace with a single id, as an ordinary user's daemon has it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.images import Member, directory, make_tar

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"]

INSIDE = """
import io, json, os, subprocess, sys
from pathlib import Path
from atoll.errors import Unsupported
from atoll.images import ImageStore
from atoll.images.sources.host import build_host_image
root, usr = Path(sys.argv[1]), Path(sys.argv[2])
store = ImageStore(root)
layers = [store._layers.add(io.BytesIO(Path(name).read_bytes()), None, lambda n: None) for name in sys.argv[3:]]
host = build_host_image(root / "host", store._layers.flavour, usr=usr)
seen = {}
for name, lowers in (("image", [layer.path for layer in reversed(layers)]), ("usr", host.usr_lowers)):
    for part in ("up", "work", "point"):
        (root / f"{name}-{part}").mkdir()
    options = f"userxattr,lowerdir={':'.join(map(str, lowers))},upperdir={root}/{name}-up,workdir={root}/{name}-work"
    point = root / f"{name}-point"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(point)], check=True)
    (point / "d" / "written").write_text("x")
    seen[name] = sorted(str(path.relative_to(point)) for path in point.rglob("*"))
try:
    store.build_debian("x", [])
except Unsupported as error:
    seen["debian"] = error.message
seen["notes"] = layers[0].notes
print(json.dumps(seen))
"""


def test_single_id_user_namespace(tmp_path: Path) -> None:
    """Layers unpack with what ids there are, deletions hold, the mask hides, and directories can be written."""
    probe = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, timeout=60, check=False)
    if probe.returncode != 0:
        pytest.skip(f"this machine allows no user namespaces here: {probe.stderr.strip()[-200:]}")
    (tmp_path / "lower").write_bytes(
        make_tar(Member("a", b"x", uid=1000, gid=33), directory("d", uid=5), Member("d/old"), Member("e/old"))
    )
    (tmp_path / "upper").write_bytes(make_tar(Member("d/.wh..wh..opq"), Member("d/new"), Member("e/.wh.old")))
    usr = tmp_path / "usr"
    (usr / "d").mkdir(parents=True)
    for name, mode in (("open", 0o644), ("secret", 0o600)):
        (usr / "d" / name).write_text(name)
        (usr / "d" / name).chmod(mode)
    if os.geteuid() == 0:
        os.chown(usr, 4321, 4321)
        os.chown(usr / "d", 4321, 4321)
    command = [*NAMESPACE, sys.executable, "-c", INSIDE, str(tmp_path / "store"), str(usr)]
    done = subprocess.run(
        [*command, str(tmp_path / "lower"), str(tmp_path / "upper")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["image"] == ["a", "d", "d/new", "d/written", "e"]
    assert seen["usr"] == ["d", "d/open", "d/written"]
    assert "owners not kept: this user has no ids to give" in seen["notes"]
    assert "debian" not in seen or "subordinate ids" in seen["debian"] or "mmdebstrap" in seen["debian"]
    assert not (usr / "d/written").exists()
