"""EGR-09: an allowed host can be a mailbox, so its use is counted to the byte, presets name no shared storage, and where
requests can be read they can be narrowed to methods and paths."""

import socket
import threading

import pytest
from lab.internet import World, dns_query, wait_for

from atoll.egress import UPLOAD, EgressPolicy, default_hosts, mode, registries
from atoll.egress.broker.sandbox import ALERT_BYTES
from atoll.errors import InvalidArgument


def test_counters_are_exact(world: World) -> None:
    """Count connections and bytes per host, both ways."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    world.inet.records["b.example"] = ["203.0.113.20"]
    with world.sandbox("a.example:5432", "b.example:5432") as box:
        for name, sizes in (("a.example", (10, 2000)), ("b.example", (300_000,))):
            for size in sizes:
                with box.connect(name, 5432) as sock:
                    sock.sendall(bytes(size))
                    got = 0
                    while got < size:
                        got += len(sock.recv(65536))
        counters = box.counters()
        assert counters["hosts"]["a.example"] == {"connections": 2, "sent": 2010, "received": 2010}
        assert counters["hosts"]["b.example"] == {"connections": 1, "sent": 300_000, "received": 300_000}
        assert counters["last_payload"] > 0
        wait_for("closed connections", lambda: box.counters()["open"] == 0)


def test_much_that_leaves_is_told(world: World) -> None:
    """Tell of an upload when it reaches the threshold, once, as no refusal."""
    world.inet.records["sink.example"] = ["203.0.113.91"]
    accepted = world.inet.take("203.0.113.91")
    with world.sandbox("sink.example:5432") as box, box.connect("sink.example", 5432) as sock:
        server = accepted.get(timeout=60)

        def drain() -> None:
            with server:
                while server.recv(1 << 20):
                    pass

        sink = threading.Thread(target=drain)
        sink.start()
        block = bytes(1 << 20)
        for _ in range(ALERT_BYTES // len(block) - 1):
            sock.sendall(block)
        assert box.events() == []
        for _ in range(4):
            sock.sendall(block)
        event = box.event("MiB sent", name="sink.example", protocol=UPLOAD)
        assert event.note.startswith("upload: 6") and event.note.endswith(" MiB sent to sink.example")
        assert box.counters()["refused"] == 0 and len(box.events()) == 1
        sock.close()
        sink.join(60)


def test_refusals_are_counted(world: World) -> None:
    """Count every refusal, also those that are not told one by one."""
    with world.sandbox() as box:
        with box.open(socket.SOCK_DGRAM) as sock:
            for _ in range(200):
                sock.sendto(dns_query(b"evil.example"), (box.link.gateway, 53))
        wait_for("most of them", lambda: box.counters()["refused"] >= 150)
        assert 0 < len([event for event in box.events() if event.name == "evil.example"]) < 150


def test_presets_open_no_shared_storage() -> None:
    """Keep object stores and paste sites that anyone can write to out of the registry set and the default list."""
    shared = (
        "amazonaws",
        "storage.googleapis",
        "blob.core",
        "gist.github",
        "pastebin",
        "cloudfront",
        "r2.dev",
        "herokuapp",
    )
    for host in (*registries(), *default_hosts(), *mode("codex")):
        assert not any(word in host for word in shared), host


RULE = "GET|HEAD http://a.example/simple/"


def request(line: str, *fields: str, body: str = "", host: str = "a.example") -> bytes:
    return "\r\n".join((f"{line} HTTP/1.1", f"Host: {host}", *fields, "", body)).encode()


REFUSED = {
    "method": request("POST /simple/x", "Content-Length: 4", body="data"),
    "path": request("GET /other/x"),
    "beside": request("GET /simple"),
    "parent": request("GET /simple/../other"),
    "encoded parent": request("GET /simple/%2e%2e/other"),
    "encoded slash": request("GET /simple/..%2fother"),
    "twice encoded": request("GET /simple/%252e%252e/other"),
    "backslash": request("GET /simple/..%5cother"),
    "double slash": request("GET //simple/x"),
    "parameter": request("GET /simple/..;/other"),
    "fragment": request("GET /other#/simple/"),
    "absolute form": request("GET http://a.example/other/simple/"),
    "other case": request("GET /Simple/x"),
    "body of a GET": request("GET /simple/x", "Content-Length: 4", body="data"),
    "chunked GET": request("GET /simple/x", "Transfer-Encoding: chunked", body="4\r\ndata\r\n0\r\n\r\n"),
    "another method behind the first": request("GET /simple/x", "X-HTTP-Method-Override: PUT"),
    "another path behind the first": request("GET /simple/x", "X-Original-URL: /other"),
    "another method, in the spelling of CGI": request("GET /simple/x", "X_HTTP_Method_Override: PUT"),
    "a body in the spelling of CGI": request("GET /simple/x", "Content_Length: 5"),
    "upgrade": request("GET /simple/ws", "Upgrade: websocket", "Connection: Upgrade"),
    "connect": request("CONNECT a.example:443"),
}


@pytest.mark.parametrize("shape", REFUSED)
def test_requests_outside_a_rule_are_refused(world: World, shape: str) -> None:
    """Answer 403 to another method, path or shape of request, before anything is dialled."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox(RULE) as box:
        before = len(world.inet.dialled)
        with box.connect("a.example", 80) as sock:
            sock.sendall(REFUSED[shape])
            assert sock.makefile("rb").readline().startswith(b"HTTP/1.1 403 ")
        assert len(world.inet.dialled) == before
        event = wait_for("an event", lambda: box.events())[0]
        assert (event.name, event.port) in (("a.example", 80), ("", 80))


def test_requests_of_a_rule_pass_one_by_one(world: World) -> None:
    """Judge every request of a connection by itself, open no other port, and count what passed to the byte."""
    name = "one-by-one.example"  # of this test alone: the list of requests belongs to all tests
    world.inet.records[name] = ["203.0.113.10"]
    with world.sandbox(f"GET|HEAD http://{name}/simple/") as box:
        with pytest.raises(ConnectionRefusedError):
            box.connect(name, 443)
        good = request("GET /simple/six/?a=../b%2f", host=name)
        absolute = request(f"GET http://{name}/simple/x", host=name)
        with box.connect(name, 80) as sock:
            for each in (good, absolute):
                sock.sendall(each)
                got = sock.recv(1000)
                while not got.endswith(f"hello from {name}".encode()):
                    got += sock.recv(1000) or pytest.fail("short")
            sock.sendall(request("POST /simple/x", "Content-Length: 4", body="data", host=name))
            with pytest.raises(ConnectionError):
                assert sock.recv(10)
        assert box.event("POST /simple/x is not among the requests", name=name, port=80)
        use = box.counters()["hosts"][name]
        assert (use["connections"], use["sent"]) == (1, len(good) + len(absolute))
        arrived = [line for line, host in world.inet.requests if host == name]
        assert arrived == [each.split(b"\r\n")[0].decode() for each in (good, absolute)], (
            "these, and nothing after them"
        )


def test_a_rule_makes_its_port_one_of_http(world: World) -> None:
    """Refuse what is not HTTP on the port of a rule, and cut what was open there before the rule."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example:5432") as box, box.connect("a.example", 5432) as sock:
        sock.sendall(b"anything")
        assert sock.recv(10) == b"anything"
        box.update("GET http://a.example:5432/")
        with pytest.raises(ConnectionError):
            sock.recv(10)
            sock.sendall(b"more")
            assert sock.recv(10)
        with box.connect("a.example", 5432) as again:
            again.sendall(b"anything\r\n\r\n")
            assert again.makefile("rb").readline().startswith(b"HTTP/1.1 403 ")
        with box.connect("a.example", 5432) as again:
            again.sendall(request("GET /x"))
            assert again.recv(100).startswith(b"GET /x "), "an echo of what was let through"
        box.update("GET http://a.example:5432/", "a.example:5432")
        with box.connect("a.example", 5432) as again:
            again.sendall(b"anything")
            assert again.recv(10) == b"anything", "what any entry opens is open"


def test_rules_are_read_back_as_they_were_written() -> None:
    entries = [RULE, "POST http://api.example:8080/v1/", "GET http://*.b.example/", "a.example:22"]
    policy = EgressPolicy.of(entries)
    assert list(policy.hosts) == entries and EgressPolicy.from_dict(policy.to_dict()) == policy
    for bad in ("GET http://*/", "GET https://a.example/", "get http://a.example/", "GET http://a.example", "TRACE http://a.example/",
                "GET http://a.example:443/", "GET http://a.example/../", "GET http://a.example/%2e", "GET  http://a.example/",
                "GET http://1.2.3.4/", "GET http://a.example/ x", "http://a.example/", "GET http://user@a.example/"):  # fmt: skip
        with pytest.raises(InvalidArgument):
            EgressPolicy.of([bad])
