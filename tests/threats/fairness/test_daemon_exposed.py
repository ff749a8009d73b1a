"""F2-L2: connections to exposed ports that never show a secret end soon and keep nobody out."""

import urllib.request
from collections.abc import Iterator

import pytest
from lab.daemon import DaemonProcess, running_daemon, until
from lab.raw_http2 import dial
from lab.sandboxes import RUNTIMES

from atoll.server import exposed


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon("[pool]\nfloor = 0\nceiling = 0\n") as made:
        yield made


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_silent_connections_keep_nobody_out_and_end(daemon: DaemonProcess, runtime: str) -> None:
    box = daemon.create(runtime=runtime)
    box.background("cd /workspace && echo hi > index.html && exec python3 -m http.server 8000")
    until(lambda: box.exec("exec 3<>/dev/tcp/127.0.0.1/8000")["exit_code"] == 0, "the server listens")
    url = daemon.post(f"{box.path}/exposures", {"port": 8000})["url"]
    port = int(url.split(":")[2].split("/")[0])
    silent = [dial(port) for _ in range(exposed.MAX_CONNECTIONS + 6)]
    half = [dial(port) for _ in range(100)]
    for sock in half:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
    try:
        for _ in range(3):
            assert urllib.request.urlopen(url + "index.html", timeout=60).read() == b"hi\n"
        open_now = daemon.get("/v1/accounts")["accounts"]["stranger 127.0.0.1"]["connections"]
        assert open_now <= exposed.MAX_STRANGERS_OF_ONE
        for sock in (silent[0], silent[-1], half[-1]):
            sock.settimeout(6 * exposed.STRANGER_SECONDS)
            assert _ended(sock), "closed without a word"
    finally:
        for sock in (*silent, *half):
            sock.close()
    box.destroy()
    until(lambda: daemon.get("/v1/accounts") == {"accounts": {}}, "all accounts are zero")


def _ended(sock: "object") -> bool:
    try:
        return sock.recv(1000) == b""  # type: ignore[attr-defined]
    except ConnectionResetError:
        return True
