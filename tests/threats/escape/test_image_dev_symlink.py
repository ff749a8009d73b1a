"""ESC-04: an image whose /dev, /proc or /sys is a link to somewhere else. Unpacking is in tests/images/test_hostile_layers.py;
here the same tree is put under a start without having passed the unpacker."""

import os
import shutil
from pathlib import Path

import pytest

from atoll.backends.contract import BoxSpec, Image, Limits
from atoll.backends.local import LocalBackend
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.paths import new_id
from atoll.errors import AtollError, Unsupported

WAYS = [("container", "absolute"), ("container", "relative"), ("container", "nested"), ("gvisor", "absolute")]


@pytest.mark.parametrize("name", ["dev", "proc", "sys", "workspace", ".atoll"])
@pytest.mark.parametrize("isolation, how", WAYS)
async def test_such_an_image_does_not_start(tmp_path: Path, name: str, isolation: str, how: str) -> None:
    """It is refused, nothing is written where the link leads, nothing is left."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if isolation == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("no runsc")
    decoy = tmp_path / "decoy"
    decoy.mkdir()
    image = tmp_path / "image"
    (image / "inner").mkdir(parents=True)
    target = {"absolute": str(decoy), "relative": "../decoy", "nested": "inner/step"}[how]
    if how == "nested":
        (image / "inner" / "step").symlink_to(decoy)
    (image / name).symlink_to(target)

    async def layers(_: Image) -> Rootfs:
        return Rootfs((str(image),))

    backend = LocalBackend(tmp_path / "home", layers=layers, engines=[os.environ.get("ATOLL_TEST_ENGINE") or "auto"])
    await backend.start()
    try:
        with pytest.raises(AtollError) as refused:
            await backend.create(BoxSpec(new_id(), Image("evil"), runtime=isolation, limits=Limits(disk_mb=16)))
        assert not isinstance(refused.value, Unsupported), refused.value  # the image is refused, not the runtime
        assert list(decoy.iterdir()) == [] and await backend.sweep(set()) == []
    finally:
        await backend.close()
