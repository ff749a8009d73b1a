"""From a command to an image that is here: the order of host, local copy, pull and Debian set."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lab.images import Member, RegistryServer, build_image, make_tar

from atoll.errors import AtollError, ImageNotAllowed, NotFound, Unavailable
from atoll.images import Allowlist, Catalog, HostImage, ImageStore, Progress, detect, obtain
from atoll.images.catalog import CatalogImage

HostMaker = Callable[[], HostImage]
LAYER = make_tar(Member("marker", b"pulled"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostMaker:
    """The machine's own image, prepared once, as the daemon keeps it."""
    image = ImageStore(tmp_path_factory.mktemp("host") / "store").host_image()
    return lambda: image


@pytest.fixture
def catalog(registry: RegistryServer) -> Catalog:
    """A small catalog whose images really exist in the registry: one program this machine has, one it has not."""
    for name in ("shell", "absent"):
        registry.push(f"catalog/{name}", "1", build_image(LAYER))
    entries = (
        CatalogImage("shell", f"{registry.address}/catalog/shell:1", ("bash",), commands=("sh",)),
        CatalogImage("absent", f"{registry.address}/catalog/absent:1", commands=("no-such-program",)),
        CatalogImage("nowhere", f"{registry.address}/catalog/nowhere:1", commands=("not-there-either",)),
    )
    return Catalog(entries, (), "shell")


def test_host_is_used_when_the_program_is_there(store: ImageStore, catalog: Catalog, host: HostMaker) -> None:
    choice = obtain(detect(["sh", "-c", "true"], None, catalog), store, catalog, host=host)
    assert isinstance(choice.image, HostImage) and "this machine has" in choice.why
    assert store.list() == ()


def test_everyday_3_a_copy_that_a_run_left_changes_nothing(
    store: ImageStore, catalog: Catalog, host: HostMaker
) -> None:
    """Detection is a pure function of command, project and config: what was fetched before plays no part."""
    entry = catalog.get("shell")
    assert entry is not None
    before = obtain(detect(["sh"], None, catalog), store, catalog, host=host)
    pulled = store.pull(entry.oci)
    after = obtain(detect(["sh"], None, catalog), store, catalog, host=host)
    assert before == after and after.image.source == "host"
    preferred = obtain(detect(["sh"], None, catalog), store, catalog, host=host, prefer="catalog")
    assert preferred.image == pulled


def test_everyday_3_an_image_is_fetched_only_for_a_program_it_has(
    store: ImageStore, registry: RegistryServer, host: HostMaker
) -> None:
    registry.push("catalog/tool", "1", build_image(LAYER))
    lacking = CatalogImage(
        "tool", f"{registry.address}/catalog/tool:1", ("git",), commands=("absent-a", "absent-b", "absent-c"),
        oci_lacks=("absent-a",), debian_lacks=("absent-a", "absent-b"),
    )  # fmt: skip
    catalog = Catalog((lacking,), (), "tool")
    nobody = obtain(detect(["absent-a"], None, catalog), store, catalog, host=host)
    assert nobody.image.source == "host" and "absent-a" in nobody.why and store.list() == ()
    assert obtain(detect(["absent-b"], None, catalog), store, catalog, host=host).image.source == "oci"
    named = obtain(detect(["absent-a"], None, catalog, explicit="tool"), store, catalog, host=host)
    assert named.image.source == "oci", "a person who names an image gets it"


def test_pulled_when_the_program_is_not_there(store: ImageStore, catalog: Catalog) -> None:
    seen: list[Progress] = []
    choice = obtain(detect(["no-such-program"], None, catalog), store, catalog, progress=seen.append)
    assert choice.image.source == "oci" and "pulled" in choice.why and seen[-1].stage == "done"
    with pytest.raises(NotFound):
        obtain(detect(["not-there-either"], None, catalog), store, catalog)


def test_everyday_11_a_stand_in_says_its_version(
    store: ImageStore, registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the image of the table cannot be pulled, the one who waits reads which version there is instead."""
    entry = CatalogImage("tongue", f"{registry.address}/catalog/tongue:3.3", ("tongue",), commands=("tongue",))
    catalog, seen = Catalog((entry,), (), "tongue"), list[Progress]()
    image = replace(store.pull(pushed(registry)), notes=("Debian's tongue 3.1", "2 devices left out"))
    monkeypatch.setattr(ImageStore, "build_debian", lambda *_args, **_options: image)
    choice = obtain(detect(["tongue"], None, catalog), store, catalog, progress=seen.append)
    told = f"{entry.oci} could not be pulled, this is Debian's tongue 3.1"
    assert choice.image == image and choice.why.endswith(told) and seen[-1] == Progress("done", told)


def pushed(registry: RegistryServer) -> str:
    registry.push("catalog/other", "1", build_image(LAYER))
    return f"{registry.address}/catalog/other:1"


def test_nothing_is_fetched_where_that_is_off(store: ImageStore, catalog: Catalog) -> None:
    with pytest.raises(NotFound, match="not on this machine"):
        obtain(detect(["no-such-program"], None, catalog), store, catalog, may_fetch=False)
    named = detect([], None, catalog, explicit="absent")
    with pytest.raises(NotFound):
        obtain(named, store, catalog, may_fetch=False)
    assert store.list() == ()


def test_named_images_are_taken_at_their_word(
    store: ImageStore, catalog: Catalog, registry: RegistryServer, host: HostMaker
) -> None:
    """A named image is pulled even where the host has the program; one that is not there is an error."""
    for name in ("shell", f"{registry.address}/catalog/shell:1"):
        choice = obtain(detect(["sh"], None, catalog, explicit=name), store, catalog, host=host)
        assert choice.image.source == "oci"
    assert obtain(detect(["sh"], None, catalog, explicit="host"), store, catalog, host=host).image.source == "host"
    with pytest.raises(NotFound):
        obtain(
            detect(["sh"], None, catalog, explicit=f"{registry.address}/catalog/nowhere:2"), store, catalog, host=host
        )


def test_allowlist_holds_on_every_way(
    store: ImageStore, catalog: Catalog, registry: RegistryServer, host: HostMaker
) -> None:
    """Named, detected, local and host images all need to be listed."""
    shell = detect(["sh"], None, catalog)
    with pytest.raises(ImageNotAllowed):
        obtain(shell, store, catalog, allowlist=Allowlist.of([]), host=host)
    with pytest.raises(ImageNotAllowed):
        obtain(detect([], None, catalog, explicit="host"), store, catalog, allowlist=Allowlist.of(["shell"]), host=host)
    assert obtain(shell, store, catalog, allowlist=Allowlist.of(["shell"]), host=host).image.source == "oci"
    local_only = obtain(shell, store, catalog, allowlist=Allowlist.of(["host"]), host=host)
    assert local_only.image.source == "host"
    with pytest.raises(ImageNotAllowed) as caught:
        obtain(
            detect(["no-such-program"], None, catalog),
            store,
            catalog,
            allowlist=Allowlist.of(["shell", "host"]),
            host=host,
        )
    assert caught.value.details["allowed"] == ["shell", "host"]


def test_when_neither_pull_nor_build_works_both_reasons_are_told(
    store: ImageStore, registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = CatalogImage("lost", f"{registry.address}/catalog/lost:1", ("git",), commands=("lost-program",))
    catalog = Catalog((entry,), (), "lost")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(AtollError) as caught:
        obtain(detect(["lost-program"], None, catalog), store, catalog)
    assert "pulled" in caught.value.message and "mmdebstrap" in caught.value.message
    assert "apt-get install mmdebstrap" in caught.value.hint
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(("name", "hint"), [("shel:3", "did you mean `shell`?"), ("zzzz", "one of host, shell")])
def test_a_word_that_no_registry_has_gets_a_name_that_needs_none(
    store: ImageStore, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    def pull(*_: object, **__: object) -> None:
        raise Unavailable("cannot reach the registry")

    monkeypatch.setattr(store, "pull", pull)
    with pytest.raises(Unavailable) as caught:
        obtain(detect([], None, catalog, explicit=name), store, catalog)
    assert caught.value.hint == f"without a registry: {hint}"


def test_detection_does_not_need_a_project(
    store: ImageStore, catalog: Catalog, tmp_path: Path, host: HostMaker
) -> None:
    assert obtain(detect(["sh"], tmp_path / "missing", catalog), store, catalog, host=host).image.source == "host"


def test_a_project_whose_language_the_host_has_needs_no_image(
    store: ImageStore, tmp_path: Path, host: HostMaker
) -> None:
    """Any of the image's commands will do where none is named: Debian has python3 and no python."""
    (tmp_path / "requirements.txt").touch()
    catalog = Catalog.load()
    found = detect([], tmp_path, catalog)
    assert found.image_name == "python" and found.program == ""
    assert obtain(found, store, catalog, may_fetch=False, host=host).image.source == "host"
