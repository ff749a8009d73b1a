"""From an image's reference to the directories a sandbox is stacked from."""

from pathlib import Path

import pytest
from lab.images import Member, RegistryServer, build_image, make_tar

from atoll.backends.contract import Image
from atoll.backends.local.layers import Layers
from atoll.errors import NotFound
from atoll.images import ImageStore
from atoll.images.layers.tree import remove_tree


async def test_the_digest_finds_the_layers_and_the_machines_own_on_top(
    registry: RegistryServer, store: ImageStore
) -> None:
    """Return the very directories of the digest, also after the name means another image."""
    ref = registry.push("layers/one", "1", build_image(make_tar(Member("file", b"first"))))
    first = store.pull(ref)
    registry.push("layers/one", "1", build_image(make_tar(Member("file", b"second"))))
    assert store.pull(ref).digest != first.digest
    found = await Layers(store.root, registry.ca)(Image(first.name, first.digest))
    top, below = map(Path, found.lowers)
    assert (below / "file").read_bytes() == b"first" and found.usr == ()
    assert "localhost" in (top / "etc/hosts").read_text()
    assert registry.ca.read_text().strip() in (top / "etc/ssl/certs/ca-certificates.crt").read_text()
    store.prune()
    with pytest.raises(NotFound) as refused:
        await Layers(store.root)(Image(first.name, first.digest))
    assert first.name in refused.value.message and refused.value.hint


async def test_the_machines_own_image_has_a_stack_for_usr(tmp_path: Path) -> None:
    """One that was found is kept, and looked for again when its directories are gone."""
    store = ImageStore(tmp_path / "store", reserved_names=())
    host = store.host_image()
    layers = Layers(store.root)
    found = await layers(Image("host", host.digest))
    assert found.lowers == (str(host.skeleton),) and found.usr == (str(host.usr_mask), "/usr")
    assert await layers(Image("host", host.digest)) is found
    remove_tree(host.skeleton)
    with pytest.raises(NotFound):
        await layers(Image("host", host.digest))
