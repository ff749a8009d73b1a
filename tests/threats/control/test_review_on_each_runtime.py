"""Findings of the second review whose walls stand outside sandboxes, tried from and with sandboxes of each runtime.

What each wall does in itself is tested where SECURITY.md says so; here it is shown that no runtime opens another way round it.
"""

import io
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.gateway import Gateway
from lab.internet import can_make_networks
from lab.keys import keyed_daemon
from lab.raw_http2 import DATA, END_HEADERS, HEADERS, SETTINGS, frame, headers
from lab.sandboxes import NO_SPARES, RUNTIMES, until

from atoll.client import calls
from atoll.client._sync.driver import Link
from atoll.client._sync.secure import RemoteLink
from atoll.errors import AtollError, InvalidArgument, TooLarge

MIB = 1 << 20
STRANGERS_MIB, SLACK_MIB = 96, 64
SMALL = {"network": False, "disk_mb": 256, "memory_mb": 256}


@pytest.fixture(scope="module", params=RUNTIMES)
def daemon(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    config = f'{NO_SPARES}[sandboxes]\nruntime = "{request.param}"\n[accounts.owner]\nmemory_mb = 64\n'
    with keyed_daemon(config) as made:
        yield made


@pytest.fixture
def operator(daemon: Gateway) -> Link:
    return Link(path=str(daemon.home / "daemon.sock"))


def peak(daemon: Gateway) -> int:
    """MiB that were ever resident in the daemon."""
    assert daemon.process is not None
    told = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", told)[0]) // 1024


FLOOD = """
import socket, ssl, sys
port, first, data = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
held, sent = [], 0
for _ in range(8):
    sock = context.wrap_socket(socket.create_connection(("host.atoll.internal", port), 30))
    sock.settimeout(1)
    held.append(sock)
    try:
        sock.sendall(first)
        for _ in range(400):
            sock.sendall(data)
            sent += len(data)
    except OSError:
        pass
print(len(held), sent)
"""


def test_h4_a_sandbox_that_was_given_the_daemons_own_port_is_a_stranger_there(daemon: Gateway, operator: Link) -> None:
    """From inside, messages without a key that never end: little is taken of them, and the owner's commands go on."""
    if not can_make_networks():
        pytest.skip("needs root to make network namespaces")
    port = int(daemon.endpoint.rpartition(":")[2])
    box = operator.call(calls.create({"host_ports": [port], "disk_mb": 256, "memory_mb": 256}))["id"]
    first = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)
    for stream in (1, 3, 5):
        first += frame(HEADERS, END_HEADERS, stream, headers("/sandbox.v1.SandboxService/CreateSession"))
        first += frame(DATA, 0, stream, b"\0" + (60 * MIB).to_bytes(4, "big"))
    data = frame(DATA, 0, 1, bytes(16384))
    before = peak(daemon)
    argv = ["python3", "-c", FLOOD, str(port), first.hex(), data.hex()]
    done = operator.call(calls.start(box, argv, timeout=300))
    assert done["exit_code"] == 0 and int(done["stdout"].split()[0]) == 8, done
    assert int(done["stdout"].split()[1]) > 0, "the flood did come through"
    assert peak(daemon) - before <= STRANGERS_MIB + SLACK_MIB
    assert operator.call(calls.start(box, "echo well", timeout=60))["stdout"] == "well\n"
    assert [one["id"] for one in operator.call(calls.list_sandboxes())["sandboxes"]] == [box], "nobody made another one"
    operator.call(calls.destroy(box))


def new_key(operator: Link, name: str, *scopes: str) -> str:
    return str(operator.call(calls.post("/v1/keys", {"name": name, "scopes": list(scopes)}))["key"])


@contextmanager
def link_of(daemon: Gateway, secret: str) -> Iterator[RemoteLink]:
    link = RemoteLink(daemon.endpoint, api_key=secret, ca_cert=str(daemon.home / "tls" / "sandbox-ca.crt"))
    try:
        yield link
    finally:
        link.close()


def test_m1_no_create_of_a_key_knocks_at_a_service_of_the_machine(daemon: Gateway, operator: Link) -> None:
    """The operator's create does, which is the control."""
    with socket.create_server(("127.0.0.1", 0)) as service, link_of(daemon, new_key(operator, "puller", "use")) as key:
        wish = {**SMALL, "image": f"127.0.0.1:{service.getsockname()[1]}/x/y:1"}
        with pytest.raises(AtollError):
            key.call(calls.create(wish))
        assert key.call(calls.list_sandboxes())["sandboxes"] == []
        service.setblocking(False)
        with pytest.raises(BlockingIOError):
            service.accept()
        service.settimeout(60)
        knocked: list[bool] = []

        def take() -> None:
            service.accept()[0].close()
            knocked.append(True)
            service.close()  # else a second try would wait for an answer

        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        with pytest.raises(AtollError):
            operator.call(calls.create(wish))
        taking.join()
        assert knocked
    operator.call(calls.post("/v1/keys/revoke", {"name": "puller"}))


def test_m4_manifests_archives_and_lists_are_bounded_and_the_sandbox_goes_on(daemon: Gateway, operator: Link) -> None:
    """With a key: each is refused or bounded, the daemon's memory with it, and all that was charged is given back."""
    with link_of(daemon, new_key(operator, "heavy", "use")) as key:
        box = key.call(calls.create({**SMALL, "disk_mb": 700}))["id"]
        fill = (
            "import os\nos.mkdir('/workspace/many')\n"
            "for n in range(20000): open(f'/workspace/many/{\"n\" * 60}{n}', 'w').close()"
        )
        assert key.call(calls.start(box, ["python3", "-c", fill], timeout=300))["exit_code"] == 0
        before = peak(daemon)
        with pytest.raises((TooLarge, InvalidArgument)):
            key.call(calls.post("/v1/manifests", {"manifest": "entries: [" + "[]," * 500_000 + "]"}))
        with pytest.raises(TooLarge):
            key.call(calls.post(calls.sandbox_path(box, "exec"), {"argv": ["x"] * 900_000}))
        wish = {"path": "/workspace/many", "recursive": True, "limit": 1_000_000}
        found = key.call(calls.file_operation(box, "list", wish))
        assert len(found["entries"]) == 20_000 and not found.get("truncated")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as made:
            info = tarfile.TarInfo("../../outside")
            info.size = 3
            made.addfile(info, io.BytesIO(b"bad"))
        with pytest.raises(AtollError):
            key.open(calls.tar(box, "/workspace", upload=True), iter([packed.getvalue()])).json()
        assert peak(daemon) - before < 220
        assert key.call(calls.start(box, "ls / /workspace | grep -c outside", timeout=60))["stdout"] == "0\n"
        key.call(calls.destroy(box))
    operator.call(calls.post("/v1/keys/revoke", {"name": "heavy"}))
    until(lambda: "memory" not in operator.call(calls.get("/v1/accounts"))["accounts"].get("total", {}), "given back")
