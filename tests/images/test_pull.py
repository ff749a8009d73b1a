"""Pulling from a real registry: TLS, login, tags, digests, platforms, shared layers, broken lines."""

import gzip
import json
import os
import random
import threading
from pathlib import Path

import pytest
import zstandard
from lab.images import (
    OCI_INDEX,
    CuttingProxy,
    Member,
    RegistryServer,
    build_image,
    digest_of,
    directory,
    make_tar,
)

from atoll.errors import DiskFull, ImageError, NotFound, PermissionDenied, Unavailable
from atoll.images import DockerConfig, ImageStore, Progress

BASE = make_tar(directory("etc"), Member("etc/motd", b"base\n"), Member("etc/gone", b"x"))
TOP = make_tar(directory("app"), Member("app/run", b"#!/bin/sh\n", mode=0o755), Member("etc/.wh.gone"))
CONFIG = {
    "Env": ["PATH=/opt/bin", "GREETING=a=b", "1bad=x"],
    "User": "1000:1000",
    "WorkingDir": "/app/",
    "Entrypoint": ["/app/run"],
    "Cmd": ["--help"],
    "Labels": {"io.containers.config": "planted"},
}


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def names(path: Path) -> set[str]:
    return set(os.listdir(path))


def test_pulls_an_image_and_knows_its_settings(registry: RegistryServer, store: ImageStore) -> None:
    """Pull by tag and know layers, environment, user, working directory, entrypoint and command."""
    ref = registry.push("team/app", "1", build_image(BASE, TOP, config=CONFIG))
    image = store.pull(ref)
    assert image.name == ref
    assert [path.parent for path in image.lowers] == [store.root / "layers"] * 2
    assert (image.lowers[0] / "app/run").read_bytes() == b"#!/bin/sh\n"
    assert (image.lowers[1] / "etc/motd").read_bytes() == b"base\n"
    assert image.env == {"PATH": "/opt/bin", "GREETING": "a=b"}
    assert (image.user, image.workdir) == ("1000:1000", "/app")
    assert (image.entrypoint, image.cmd) == (("/app/run",), ("--help",))
    assert image.source == "oci" and image.size == len(b"base\n") + 1 + len(b"#!/bin/sh\n")
    assert "planted" not in json.dumps(image.to_json())
    assert store.resolve(ref) == image and store.resolve(image.digest).lowers == image.lowers
    assert [item for item in names(store.root / "blobs") if not item.endswith(".lock")] == []


def test_pulls_by_digest_only_what_has_that_digest(registry: RegistryServer, store: ImageStore) -> None:
    """A digest reference gives exactly that manifest and is found again by it."""
    built = build_image(make_tar(Member("a", b"pinned")))
    registry.push("team/pinned", "1", built)
    image = store.pull(f"{registry.address}/team/pinned@{built.digest}")
    assert image.digest == built.digest
    assert store.find(f"{registry.address}/team/pinned@{built.digest}") is not None
    with pytest.raises(NotFound):
        store.pull(f"{registry.address}/team/pinned@sha256:{'0' * 64}")


def test_picks_the_platform_from_an_index(registry: RegistryServer, store: ImageStore) -> None:
    """Of an index with several platforms take the one asked for, and name the others when it is missing."""
    entries = []
    for architecture in ("amd64", "arm64"):
        built = build_image(make_tar(Member("arch", architecture.encode())), architecture=architecture)
        registry.push("team/multi", architecture, built)
        entries.append(
            {
                "mediaType": built.media_type,
                "digest": built.digest,
                "size": len(built.manifest),
                "platform": {"os": "linux", "architecture": architecture},
            }
        )
    attestation = {**entries[0], "platform": {"os": "unknown", "architecture": "unknown"}}
    index = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [attestation, *entries]}).encode()
    ref = registry.push_manifest("team/multi", "both", index, OCI_INDEX)
    for architecture in ("amd64", "arm64"):
        image = store.pull(ref, platform=f"linux/{architecture}")
        assert (image.lowers[0] / "arch").read_text() == architecture
    assert store.find(f"{registry.address}/team/multi@{digest_of(index)}") is not None
    with pytest.raises(ImageError) as caught:
        store.pull(ref, platform="linux/s390x")
    assert "linux/amd64, linux/arm64" in caught.value.hint and "unknown" not in caught.value.hint


@pytest.mark.parametrize("kind", ["plain", "gzip", "gzip-members", "zstd"])
def test_reads_every_compression(registry: RegistryServer, store: ImageStore, kind: str) -> None:
    """Layers may be plain, gzip (also of several members) or zstd."""

    def compress(raw: bytes) -> bytes:
        if kind == "gzip-members":
            return gzip.compress(raw[:700]) + gzip.compress(raw[700:])
        return {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}[kind](raw)

    content = noise(300_000)
    ref = registry.push(f"team/{kind}", "1", build_image(make_tar(Member("data", content)), compress=compress))
    assert (store.pull(ref).lowers[0] / "data").read_bytes() == content


def test_stores_shared_layers_once(registry: RegistryServer, store: ImageStore) -> None:
    """Two images with a common layer share its directory, and the second pull does not download it."""
    first = store.pull(registry.push("team/one", "1", build_image(BASE, make_tar(Member("one", b"1")))))
    seen: list[Progress] = []
    own = make_tar(Member("two", b"2"))
    second = store.pull(registry.push("team/two", "1", build_image(BASE, own)), progress=seen.append)
    assert first.lowers[1] == second.lowers[1]
    assert max(step.total for step in seen if step.stage == "download") < len(gzip.compress(own)) + 100
    assert len([name for name in names(store.root / "layers") if not name.endswith(".json")]) == 3


def test_lists_a_repeated_layer_once(registry: RegistryServer, store: ImageStore) -> None:
    """A layer that an image repeats appears once in the stack, where it counts: overlayfs refuses it twice."""
    empty, data = make_tar(), make_tar(Member("x", b"x"))
    image = store.pull(registry.push("team/repeats", "1", build_image(empty, data, empty)))
    assert [path.name for path in image.lowers] == [digest_of(raw)[7:] for raw in (empty, data)]


def test_takes_up_a_cut_download(registry: RegistryServer, tmp_path: Path) -> None:
    """A connection cut in the middle of a blob is taken up with a range request, and the content is right."""
    content = noise(3_000_000)
    ref = registry.push("team/big", "1", build_image(make_tar(Member("data", content))))
    proxy = CuttingProxy(registry.address, after=600_000, cuts=3)
    steps: list[Progress] = []
    try:
        credentials = registry.docker_config(tmp_path, address=proxy.address)
        store = ImageStore(tmp_path / "store", credentials=credentials, ca_file=registry.ca)
        image = store.pull(ref.replace(registry.address, proxy.address), progress=steps.append)
    finally:
        proxy.close()
    assert proxy.cuts_left == 0
    done = [step.done for step in steps if step.stage == "download"]
    assert done == sorted(done), "it went on where it was cut, and did not start over"
    assert (image.lowers[0] / "data").read_bytes() == content


def test_next_pull_goes_on_where_the_last_one_stopped(registry: RegistryServer, tmp_path: Path) -> None:
    """A pull that gave up leaves what it has; the next one asks only for the rest."""
    content = noise(2_000_000)
    ref = registry.push("team/later", "1", build_image(make_tar(Member("data", content))))
    credentials = registry.docker_config(tmp_path)
    store = ImageStore(tmp_path / "store", credentials=credentials, ca_file=registry.ca)

    class GaveUp(Exception):
        pass

    def give_up(step: Progress) -> None:
        if step.stage == "download" and step.done > 500_000:
            raise GaveUp

    with pytest.raises(GaveUp):
        store.pull(ref, progress=give_up)
    assert store.list() == ()
    left = [path.stat().st_size for path in (store.root / "blobs").iterdir() if path.suffix != ".lock"]
    assert left and left[0] > 400_000
    steps: list[Progress] = []
    image = store.pull(ref, progress=steps.append)
    done = [step.done for step in steps if step.stage == "download"]
    assert done[0] == left[0] and done == sorted(done)
    assert (image.lowers[0] / "data").read_bytes() == content


def test_private_images_need_the_right_login(registry: RegistryServer, tmp_path: Path) -> None:
    """Without a login, and with a wrong one, the registry's refusal reaches the caller with what to do."""
    ref = registry.push("team/private", "1", build_image(BASE))
    anonymous = ImageStore(tmp_path / "a", credentials=DockerConfig([]), ca_file=registry.ca)
    with pytest.raises(PermissionDenied) as caught:
        anonymous.pull(ref)
    assert "docker login" in caught.value.hint
    wrong = ImageStore(tmp_path / "b", credentials=registry.docker_config(tmp_path, "guess"), ca_file=registry.ca)
    with pytest.raises(PermissionDenied):
        wrong.pull(ref)


def test_refuses_a_certificate_it_does_not_know(registry: RegistryServer, tmp_path: Path) -> None:
    """An unknown certificate ends the pull; it does not fall back to plain HTTP, also on loopback."""
    ref = registry.push("team/tls", "1", build_image(BASE))
    store = ImageStore(tmp_path / "s", credentials=registry.docker_config(tmp_path))
    with pytest.raises(ImageError, match="certificate"):
        store.pull(ref)


def test_missing_tag_and_missing_registry(registry: RegistryServer, store: ImageStore) -> None:
    """A tag that is not there and a registry that does not answer are different errors."""
    registry.push("team/tags", "1", build_image(BASE))
    with pytest.raises(NotFound):
        store.pull(f"{registry.address}/team/tags:2")
    closed = CuttingProxy(registry.address, after=0, cuts=0)
    closed.close()
    with pytest.raises(Unavailable):
        store.pull(f"{closed.address}/team/tags:1")


def test_concurrent_pulls_of_one_image(registry: RegistryServer, store: ImageStore) -> None:
    """Pulls of the same image at the same time all succeed and leave one copy."""
    built = build_image(make_tar(Member("data", noise(500_000))), BASE)
    ref = registry.push("team/race", "1", built)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            store.pull(ref)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert failures == []
    assert [image.name for image in store.list()] == [ref]
    assert os.listdir(store.root / "tmp") == []


def test_a_moved_tag_gives_the_new_image(registry: RegistryServer, store: ImageStore) -> None:
    """Pulling a tag again follows it; the old image stays until pruned, for the sandboxes that use it."""
    ref = registry.push("team/moves", "1", build_image(make_tar(Member("v", b"1"))))
    old = store.pull(ref)
    registry.push("team/moves", "1", build_image(make_tar(Member("v", b"2"))))
    new = store.pull(ref)
    assert (new.lowers[0] / "v").read_bytes() == b"2"
    store.prune(in_use=[old.digest])
    assert store.resolve(old.digest).lowers == old.lowers and (old.lowers[0] / "v").exists()
    store.prune()
    assert store.find(old.digest) is None and not old.lowers[0].exists()
    assert store.resolve(ref) == new


@pytest.mark.parametrize("content", [noise(3_000_000), bytes(5_000_000)], ids=["download", "unpacked"])
def test_an_image_takes_no_room_that_is_promised(
    registry: RegistryServer, store: ImageStore, content: bytes, request: pytest.FixtureRequest
) -> None:
    """What is free beyond what sandboxes were promised is the bound, downloaded or unpacked; nothing stays of what did not fit."""
    ref = registry.push(f"team/{request.node.callspec.id}-room", "1", build_image(make_tar(Member("data", content))))
    taken = store.disk_bytes()
    store.room = lambda: 1_000_000 - (store.disk_bytes() - taken)
    try:
        with pytest.raises((DiskFull, ImageError)):
            store.pull(ref)
        assert store.disk_bytes() == taken
        store.room = lambda: 20_000_000
        assert (store.pull(ref).lowers[0] / "data").read_bytes() == content
    finally:
        store.room = None
