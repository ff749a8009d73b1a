"""F2-M1: a key pulls without the operator's login, from public registries alone, and only so much."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.images import Member, RegistryServer, build_image, make_tar

from atoll import config
from atoll.core.policy.images import StoredImages
from atoll.errors import AtollError, Exhausted, ImageError, PermissionDenied
from atoll.images import Catalog, Detection, ImageStore, obtain
from atoll.images.catalog import Allowlist
from atoll.images.registry import public
from atoll.images.registry.public import Guest, public_address

KEY = Guest("key:agent", 1 << 30)


def pull(store: ImageStore, name: str, guest: Guest | None, **more: Any) -> Any:
    found = Detection(name, "named", "", explicit=True)
    return obtain(found, store, Catalog.load(), guest=guest, **more).image


@pytest.fixture
def knocks() -> Iterator[tuple[int, list[str]]]:
    """A service of this machine that counts who comes."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    accept = server.get_request

    def counted() -> Any:
        seen.append("connected")
        return accept()

    server.get_request = counted  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1], seen
    server.shutdown()
    server.server_close()


def test_a_private_image_is_not_pulled_for_a_key(store: ImageStore, registry: RegistryServer) -> None:
    """The operator's login opens it for the operator; a key is told that it is not there for it, also on a listed image."""
    registry.push("secret/app", "1", build_image(make_tar(Member("f", b"private"))))
    name = f"{registry.address}/secret/app:1"
    with pytest.raises(PermissionDenied):
        pull(store, name, KEY)
    with pytest.raises(PermissionDenied):
        pull(store, name, KEY, allowlist=Allowlist.of([name]))
    assert pull(store, name, None).name == name
    assert pull(store, name, KEY).name == name, "what is here can be used"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "abc.localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"])
def test_no_service_of_this_machine_is_knocked_at(tmp_path: Path, knocks: tuple[int, list[str]], host: str) -> None:
    port, seen = knocks
    store = ImageStore(tmp_path / "store", insecure_registries=[f"{host}:{port}"])
    with pytest.raises(AtollError):
        pull(store, f"{host}:{port}/x/y:1", KEY)
    assert seen == []


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.1.1", "100.64.0.1", "::1", "fd00::1"]
)
def test_a_name_with_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Also when another of its addresses is public: the resolver may answer differently each time."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    answers = [(socket.AF_INET, 1, 6, "", ("203.0.113.9", 443)), (family, 1, 6, "", (address, 443))]
    monkeypatch.setattr(public.socket, "getaddrinfo", lambda *args, **more: answers)
    with pytest.raises(PermissionDenied):
        public_address("registry.example", 443)
    monkeypatch.setattr(public.socket, "getaddrinfo", lambda *args, **more: answers[:1])
    assert public_address("registry.example", 443) == "203.0.113.9"


def test_what_a_key_brings_is_bounded(
    store: ImageStore, registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image, and all of a key's images together; a pull that fails leaves nothing."""
    monkeypatch.setattr("atoll.images.store.ANONYMOUS", store._credentials)  # this registry has no public part
    for number in range(3):
        layer = make_tar(Member("f", bytes([number]) * 200_000))
        registry.push(f"big/{number}", "1", build_image(layer))
    names = [f"{registry.address}/big/{number}:1" for number in range(3)]
    small = Guest("key:small", 100_000, anywhere=True)
    before = sorted((store.root / "layers").iterdir())
    with pytest.raises(ImageError):
        store.pull(names[0], guest=small)
    assert sorted((store.root / "layers").iterdir()) == before and not list((store.root / "blobs").iterdir())
    roomy = Guest("key:roomy", 300_000, anywhere=True)
    store.pull(names[0], guest=roomy)
    with pytest.raises(ImageError):
        store.pull(names[1], guest=roomy)
    with pytest.raises(Exhausted):
        store.pull(names[1], guest=Guest("key:roomy", 100_000, anywhere=True))
    assert store.pull(names[1], guest=Guest("key:other", 300_000, anywhere=True)).name == names[1]
    assert set(json.loads((store.root / "key-pulls.json").read_bytes())) == {"key:roomy", "key:other"}


async def test_create_by_a_key_asks_for_a_guest(tmp_path: Path, registry: RegistryServer) -> None:
    """The way every surface takes: an image named at create is looked for with the rights of the caller."""
    images = StoredImages(tmp_path / "store", config.Images(ca_file=str(registry.ca)))
    with pytest.raises(PermissionDenied):
        await images.choose(f"{registry.address}/any/thing:1", guest="key:agent")
