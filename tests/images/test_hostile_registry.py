"""A registry, or somebody in its place, that lies, floods, redirects, and asks for passwords it should not get."""

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from lab.images import OCI_MANIFEST, BuiltImage, Member, build_image, digest_of, make_tar

from atoll.errors import AtollError, ImageError
from atoll.images import DockerConfig, ImageStore, Limits, Reference
from atoll.images.registry.transport import Transport

Answer = tuple[int, dict[str, str], bytes]
LAYER = make_tar(Member("a", b"x" * 5000))


class FakeRegistry:
    """An HTTP server on loopback whose answers a test writes; it remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[str, Any], Answer] = lambda path, headers: (404, {}, b"")
        self.asked: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = {key.lower(): value for key, value in self.headers.items()}
                headers["body"] = self.rfile.read(int(headers.get("content-length", "0"))).decode()
                outer.asked.append((self.path, headers))
                status, more, body = outer.answer(self.path, headers)
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **more}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def serve(self, image: BuiltImage, **changed: Answer) -> None:
        """Serve an image; `changed` replaces the answers for manifest, config or layer."""
        layer = image.layers[0]

        def answer(path: str, _headers: Any) -> Answer:
            if "/manifests/" in path:
                return changed.get("manifest", (200, {"Content-Type": OCI_MANIFEST}, image.manifest))
            digest = path.rpartition("/")[2]
            if digest == layer and "layer" in changed:
                return changed["layer"]
            if digest in image.blobs and digest != layer and "config" in changed:
                return changed["config"]
            return (200, {}, image.blobs[digest]) if digest in image.blobs else (404, {}, b"")

        self.answer = answer

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=30)


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    server = FakeRegistry()
    yield server
    server.close()


@pytest.fixture
def other() -> Iterator[FakeRegistry]:
    server = FakeRegistry()
    yield server
    server.close()


def store_at(tmp_path: Path, login_for: str = "", **limits: int) -> ImageStore:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"auths": {login_for: {"username": "alice", "password": "secret"}}}))
    return ImageStore(tmp_path / "store", credentials=DockerConfig([config]), limits=Limits(**limits))


def nothing_stored(store: ImageStore) -> bool:
    layers = [path for path in (store.root / "layers").iterdir()]
    return store.list() == () and layers == [] and list((store.root / "tmp").iterdir()) == []


def test_refuses_a_layer_with_another_digest(fake: FakeRegistry, tmp_path: Path) -> None:
    """Bytes that do not have the announced digest are thrown away, also the partial file."""
    image = build_image(LAYER)
    wrong = bytearray(image.blobs[image.layers[0]])
    wrong[-1] ^= 1
    fake.serve(image, layer=(200, {}, bytes(wrong)))
    store = store_at(tmp_path)
    with pytest.raises(ImageError, match="another digest"):
        store.pull(f"{fake.address}/x:1")
    assert nothing_stored(store)
    assert not [path for path in (store.root / "blobs").iterdir() if path.suffix != ".lock"]


def test_refuses_a_manifest_with_another_digest(fake: FakeRegistry, tmp_path: Path) -> None:
    fake.serve(build_image(LAYER))
    with pytest.raises(ImageError, match="another digest"):
        store_at(tmp_path).pull(f"{fake.address}/x@sha256:{'a' * 64}")


def test_refuses_a_configuration_with_another_digest(fake: FakeRegistry, tmp_path: Path) -> None:
    image = build_image(LAYER)
    config = json.loads(image.manifest)["config"]
    fake.serve(image, config=(200, {}, b" " * config["size"]))
    with pytest.raises(ImageError, match="another digest"):
        store_at(tmp_path).pull(f"{fake.address}/x:1")


def test_stops_reading_more_than_was_announced(fake: FakeRegistry, tmp_path: Path) -> None:
    """Neither a manifest nor a blob may be longer than its limit."""
    image = build_image(LAYER)
    fake.serve(image, layer=(200, {}, image.blobs[image.layers[0]] + bytes(100_000)))
    with pytest.raises(ImageError, match="more than"):
        store_at(tmp_path).pull(f"{fake.address}/x:1")
    fake.serve(image, manifest=(200, {}, bytes(200_000)))
    with pytest.raises(ImageError, match="more than"):
        store_at(tmp_path, manifest_bytes=100_000).pull(f"{fake.address}/x:1")
    fake.serve(build_image(*[make_tar(Member(str(number))) for number in range(5)]))
    with pytest.raises(ImageError, match="layers"):
        store_at(tmp_path, layers=4).pull(f"{fake.address}/x:1")


def test_login_never_follows_a_redirect(fake: FakeRegistry, other: FakeRegistry, tmp_path: Path) -> None:
    """A blob may come from another server, which gets the request without the login."""
    image = build_image(LAYER)
    layer = image.layers[0]

    def registry_answer(path: str, headers: dict[str, str]) -> Answer:
        if "authorization" not in headers:
            return 401, {"WWW-Authenticate": 'Basic realm="r"'}, b""
        if path.endswith(layer):
            return 307, {"Location": f"http://{other.address}/storage?sig=1"}, b""
        if "/manifests/" in path:
            return 200, {"Content-Type": OCI_MANIFEST}, image.manifest
        return 200, {}, image.blobs[path.rpartition("/")[2]]

    fake.answer = registry_answer
    other.answer = lambda path, headers: (200, {}, image.blobs[layer])
    pulled = store_at(tmp_path, login_for=fake.address).pull(f"{fake.address}/x:1")
    assert (pulled.lowers[0] / "a").read_bytes() == b"x" * 5000
    assert other.asked and all("authorization" not in headers for _, headers in other.asked)
    assert any("authorization" in headers for _, headers in fake.asked)


def test_login_goes_only_to_the_registry_it_is_for(fake: FakeRegistry, tmp_path: Path) -> None:
    """A registry that asks for a login gets none that belongs to another."""
    fake.answer = lambda path, headers: (401, {"WWW-Authenticate": 'Basic realm="r"'}, b"")
    with pytest.raises(AtollError):
        store_at(tmp_path, login_for="registry.example.com").pull(f"{fake.address}/x:1")
    assert all("authorization" not in headers for _, headers in fake.asked)


@pytest.mark.parametrize(
    "target",
    ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://registry.example.com/x", "http://user@127.0.0.1/x", ""],
)
def test_refuses_redirects_to_strange_places(fake: FakeRegistry, tmp_path: Path, target: str) -> None:
    """A redirect leads to a web address, and not from here to an unencrypted one elsewhere."""
    fake.answer = lambda path, headers: (302, {"Location": target}, b"")
    with pytest.raises(ImageError, match="redirects"):
        store_at(tmp_path).pull(f"{fake.address}/x:1")


@pytest.mark.parametrize(
    "target",
    [
        "https://169.254.169.254/latest/meta-data", "https://127.0.0.1/x", "https://[::1]/x", "https://localhost/x",
        "https://0.0.0.0/x", "https://[fe80::1]/x", "http://cdn.example.com/x", "gopher://cdn.example.com/x",
    ],
)  # fmt: skip
def test_a_public_registry_cannot_send_us_to_this_machine(target: str) -> None:
    """Redirects and token services of a registry elsewhere lead neither here nor to plain HTTP."""
    transport = Transport(Reference.parse("registry.example.com/x"))
    with pytest.raises(ImageError, match="redirects"):
        transport._check_target(target)
    transport._check_target("https://cdn.example.com/x")


def test_identity_tokens_are_exchanged(fake: FakeRegistry, tmp_path: Path) -> None:
    """An identity token goes to the token service in the body, never in an address."""
    image = build_image(LAYER)

    def answer(path: str, headers: dict[str, str]) -> Answer:
        if path == "/token":
            assert "grant_type=refresh_token" in headers["body"] and "refresh_token=r3fr3sh" in headers["body"]
            return 200, {}, json.dumps({"access_token": "t0k3n"}).encode()
        if headers.get("authorization") != "Bearer t0k3n":
            return 401, {"WWW-Authenticate": f'Bearer realm="http://{fake.address}/token"'}, b""
        if "/manifests/" in path:
            return 200, {"Content-Type": OCI_MANIFEST}, image.manifest
        return 200, {}, image.blobs[path.rpartition("/")[2]]

    fake.answer = answer
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"auths": {fake.address: {"identitytoken": "r3fr3sh"}}}))
    store = ImageStore(tmp_path / "store", credentials=DockerConfig([config]))
    assert store.pull(f"{fake.address}/x:1").digest == image.digest
    assert not [path for path, _ in fake.asked if "r3fr3sh" in path]


def test_ignores_addresses_inside_a_manifest(fake: FakeRegistry, other: FakeRegistry, tmp_path: Path) -> None:
    """A layer's own list of addresses is never asked: it could name any server and get the login."""
    image = build_image(LAYER)
    manifest = json.loads(image.manifest)
    manifest["layers"][0]["urls"] = [f"http://{other.address}/steal"]
    fake.serve(BuiltImage(image.blobs, json.dumps(manifest).encode()))
    store_at(tmp_path).pull(f"{fake.address}/x:1")
    assert other.asked == []


def test_bearer_tokens(fake: FakeRegistry, tmp_path: Path) -> None:
    """The login buys a token for exactly this repository, and the token is what the registry sees."""
    image = build_image(LAYER)

    def answer(path: str, headers: dict[str, str]) -> Answer:
        if path.startswith("/token"):
            assert "scope=repository%3Ateam%2Fx%3Apull" in path and "service=svc" in path
            assert headers["authorization"].startswith("Basic ")
            return 200, {}, json.dumps({"token": "t0k3n"}).encode()
        if headers.get("authorization") != "Bearer t0k3n":
            return 401, {"WWW-Authenticate": f'Bearer realm="http://{fake.address}/token",service="svc"'}, b""
        if "/manifests/" in path:
            return 200, {"Content-Type": OCI_MANIFEST}, image.manifest
        return 200, {}, image.blobs[path.rpartition("/")[2]]

    fake.answer = answer
    assert store_at(tmp_path, login_for=fake.address).pull(f"{fake.address}/team/x:1").digest == image.digest


def test_ranges_that_are_not_honoured_start_over(fake: FakeRegistry, tmp_path: Path) -> None:
    """A server without range support, or with a wrong one, costs time and never corrupts the blob."""
    image = build_image(LAYER)
    layer = image.layers[0]
    for status, more in ((200, {}), (206, {"Content-Range": "bytes 0-9/10"}), (416, {})):
        store = store_at(tmp_path / str(status)) if (tmp_path / str(status)).mkdir() is None else None
        assert store is not None
        (store.root / "blobs" / layer.replace(":", "-")).write_bytes(b"part of something")

        def answer(path: str, headers: dict[str, str], status: int = status, more: dict[str, str] = more) -> Answer:
            if "/manifests/" in path:
                return 200, {"Content-Type": OCI_MANIFEST}, image.manifest
            if path.endswith(layer) and "range" in headers and status != 200:
                return status, more, b"0123456789"
            return 200, {}, image.blobs[path.rpartition("/")[2]]

        fake.answer = answer
        assert (store.pull(f"{fake.address}/x:1").lowers[0] / "a").read_bytes() == b"x" * 5000


BAD_MANIFESTS = {
    "not json": b"{",
    "not an object": b"[]",
    "old schema": json.dumps({"schemaVersion": 1, "fsLayers": []}).encode(),
    "no layers": json.dumps({"schemaVersion": 2, "config": {}, "layers": []}).encode(),
    "digest of another kind": json.dumps(
        {"schemaVersion": 2, "config": {"digest": "md5:" + "0" * 32, "size": 1}, "layers": [{}]}
    ).encode(),
    "digest as a path": json.dumps(
        {"schemaVersion": 2, "config": {"digest": "sha256:../../../etc/passwd", "size": 1}, "layers": [{}]}
    ).encode(),
    "negative size": json.dumps(
        {"schemaVersion": 2, "config": {"digest": digest_of(b""), "size": -1}, "layers": [{}]}
    ).encode(),
}


@pytest.mark.parametrize("name", BAD_MANIFESTS)
def test_refuses_broken_manifests(fake: FakeRegistry, tmp_path: Path, name: str) -> None:
    fake.answer = lambda path, headers: (200, {"Content-Type": OCI_MANIFEST}, BAD_MANIFESTS[name])
    store = store_at(tmp_path)
    with pytest.raises(AtollError) as caught:
        store.pull(f"{fake.address}/x:1")
    assert caught.value.code in ("image_error", "unsupported") and nothing_stored(store)


BAD_CONFIGS = {
    "workdir over a descriptor": {"WorkingDir": "/proc/self/fd/7"},
    "workdir in disguise": {"WorkingDir": "//./proc//self/fd/8"},
    "workdir that climbs": {"WorkingDir": "/app/../proc/self/fd/9"},
    "workdir in dev": {"WorkingDir": "/dev"},
    "user out of range": {"User": "4294967296"},
    "user with a sign": {"User": "-1"},
    "user as hexadecimal": {"User": "0x0"},
    "entrypoint with nul": {"Entrypoint": ["a\0b"]},
    "env that is no list": {"Env": {"A": "b"}},
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_refuses_dangerous_settings(fake: FakeRegistry, tmp_path: Path, name: str) -> None:
    """ESC-01, ESC-06: settings that could point at a descriptor or another user end the pull."""
    fake.serve(build_image(LAYER, config=BAD_CONFIGS[name]))
    store = store_at(tmp_path)
    with pytest.raises(ImageError):
        store.pull(f"{fake.address}/x:1")
    assert nothing_stored(store)


def test_error_text_of_a_registry_cannot_steer_a_terminal(fake: FakeRegistry, tmp_path: Path) -> None:
    body = json.dumps({"errors": [{"message": "\x1b]0;owned\x07no"}]}).encode()
    fake.answer = lambda path, headers: (404, {}, body)
    with pytest.raises(AtollError) as caught:
        store_at(tmp_path).pull(f"{fake.address}/x:1")
    assert caught.value.message.isprintable() and "owned" in caught.value.message


def test_layer_list_must_agree_with_the_configuration(fake: FakeRegistry, tmp_path: Path) -> None:
    image = build_image(LAYER)
    manifest = json.loads(image.manifest)
    manifest["layers"] *= 2
    fake.serve(BuiltImage(image.blobs, json.dumps(manifest).encode()))
    with pytest.raises(ImageError, match="same layers"):
        store_at(tmp_path).pull(f"{fake.address}/x:1")


def test_layer_content_must_be_what_the_configuration_says(fake: FakeRegistry, tmp_path: Path) -> None:
    """The blob has its digest but unpacks to something else than the image lists: refused."""
    image = build_image(LAYER)
    swapped = gzip.compress(make_tar(Member("evil", b"x")), mtime=0)
    manifest = json.loads(image.manifest)
    manifest["layers"][0] |= {"digest": digest_of(swapped), "size": len(swapped)}
    fake.serve(BuiltImage({**image.blobs, digest_of(swapped): swapped}, json.dumps(manifest).encode()))
    store = store_at(tmp_path)
    with pytest.raises(ImageError, match="content"):
        store.pull(f"{fake.address}/x:1")
    assert nothing_stored(store)
