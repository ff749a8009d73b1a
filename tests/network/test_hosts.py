"""Lists of hosts on real sandboxes: in force from the first instruction, changed live, seen by people."""

import json
from collections.abc import Callable

import pytest
from lab.network import ALLOWED, OTHER, Box, Failed, Lab, client, hosts, until

from atoll.egress import default_hosts


def test_k8e_P17_the_default_list_is_five_names(make: Callable[..., Box]) -> None:
    """Give a sandbox for which nothing was said the five names, and no other."""
    box = make()
    assert box.info()["hosts"] == list(default_hosts()) and len(default_hosts()) == 5
    ran = box.run(client + "print(fetch('https://a.example/'))")
    assert ran["stdout"].startswith("no ")


def test_k8e_P18_each_sandbox_has_its_own_list(make: Callable[..., Box], lab: Lab) -> None:
    """Replace the default list at create, without an effect on another sandbox."""
    first, second = make(hosts=["a.example"]), make(hosts=["b.example"])
    code = client + "print(fetch('http://a.example/')); print(fetch('http://b.example/'))"
    assert first.run(code)["stdout"].splitlines() == ["got hello from a.example", "no gaierror"]
    assert second.run(code)["stdout"].splitlines() == ["no gaierror", "got hello from b.example"]


def test_k8e_P23_runtime_and_hosts_chosen_at_create(make: Callable[..., Box], runtime: str) -> None:
    """Reach the hosts that were named from the runtime that was named, and no other host."""
    box = make(hosts=["a.example", "b.example"])
    assert (box.info()["runtime"], box.info()["hosts"]) == (runtime, ["a.example", "b.example"])
    ran = box.run(client + "[print(fetch(f'http://{name}.example/')) for name in 'abc']")
    assert ran["stdout"].splitlines() == ["got hello from a.example", "got hello from b.example", "no gaierror"]


def test_a_refusal_is_told(make: Callable[..., Box], lab: Lab) -> None:
    """Name the host that was refused in the result, the events, the log and the counters."""
    box = make(hosts=["a.example"])
    ran = box.run("import socket\nsocket.create_connection(('c.example', 443), 20)")
    assert ran["exit_code"] == 1
    assert [(item["name"], item["reason"]) for item in ran["blocked"]] == [("c.example", "not an allowed host")]
    assert "c.example is not an allowed host" in ran["blocked"][0]["note"]
    assert [event["name"] for event in lab.blocked(box)] == ["c.example"]
    log = lab.get("/v1/egress/log?limit=10000")["events"]
    assert any(event["sandbox_id"] == box.id and event["name"] == "c.example" for event in log)
    later = box.run("print(1)")
    assert later["blocked"] == []
    assert lab.get(f"{box.path}/hosts")["refused"] >= 1


def test_use_is_counted(make: Callable[..., Box], lab: Lab) -> None:
    """Count connections and bytes per host."""
    box = make(hosts=["a.example"])
    assert "got hello" in box.run(client + "print(fetch('http://a.example/'))")["stdout"]
    used = until(lambda: lab.get(f"{box.path}/hosts")["used"].get("a.example"), "the connection is counted")
    assert used["connections"] == 1
    until(lambda: lab.get(f"{box.path}/hosts")["used"]["a.example"]["received"] > 10, "its bytes are counted")


def test_the_list_changes_live(make: Callable[..., Box]) -> None:
    """Add, remove, empty and restore the list of a running sandbox."""
    box = make(hosts=["a.example"])
    code = client + "print(fetch('http://a.example/')); print(fetch('http://b.example/'))"
    assert hosts(box, add=["b.example"])["hosts"] == ["a.example", "b.example"]
    assert [line[:3] for line in box.run(code)["stdout"].splitlines()] == ["got", "got"]
    assert hosts(box, remove=["a.example"])["hosts"] == ["b.example"]
    assert [line[:3] for line in box.run(code)["stdout"].splitlines()] == ["no ", "got"]
    assert hosts(box, hosts=[])["hosts"] == []
    assert [line[:3] for line in box.run(code)["stdout"].splitlines()] == ["no ", "no "]
    assert hosts(box) == hosts(box, hosts=None)
    assert box.info()["hosts"] == list(default_hosts())
    assert hosts(box, hosts=["*.a.example"])["hosts"] == ["*.a.example"]
    wild = client + "print(fetch('http://deep.a.example/')); print(fetch('http://a.example/'))"
    assert [line[:3] for line in box.run(wild)["stdout"].splitlines()] == ["got", "no "]


def test_closing_a_host_cuts_what_is_open(make: Callable[..., Box], lab: Lab) -> None:
    """End a connection in use when its host is taken off the list, and leave others alone."""
    box = make(hosts=["a.example:5432", "b.example:5432"])
    code = """
import socket, sys
one, two = socket.create_connection(("a.example", 5432), 20), socket.create_connection(("b.example", 5432), 20)
for sock in (one, two):
    sock.settimeout(60)
    sock.sendall(b"x")
    assert sock.recv(10)
print("open", flush=True)
try:
    print("cut" if one.recv(10) == b"" else "data", flush=True)
except ConnectionResetError:
    print("cut", flush=True)
two.sendall(b"y")
print("alive" if two.recv(10) else "dead", flush=True)
"""
    command = box.daemon.post(f"{box.path}/run", {"code": code, "language": "python", "background": True})["command_id"]
    until(lambda: "open" in box.command(command)["stdout"], "both connections are open")
    hosts(box, remove=["a.example:5432"])
    ended = box.ended(command)
    assert ended["stdout"].split() == ["open", "cut", "alive"], ended


def test_no_network_is_no_interface(make: Callable[..., Box], lab: Lab) -> None:
    """Have loopback only with network off, whatever list is given, and no way to change that (ak_P11)."""
    box = make(network=False, hosts=["a.example"])
    names = box.run("import socket; print(*[name for _, name in socket.if_nameindex()])")["stdout"].split()
    assert names == ["lo"]
    assert box.run(client + "print(fetch('http://a.example/'))")["stdout"].startswith("no ")
    with pytest.raises(Failed) as failed:
        hosts(box, add=["a.example"])
    assert failed.value.code == "failed_precondition"
    assert lab.get(f"{box.path}/hosts")["network"] == "none"


def test_an_empty_list_reaches_nothing(make: Callable[..., Box], lab: Lab) -> None:
    """Refuse names and addresses alike when the list is empty."""
    before = lab.dialled(ALLOWED)
    box = make(hosts=[])
    ran = box.run(client + f"print(fetch('http://a.example/')); print(fetch('http://{ALLOWED}/'))")
    assert [line[:3] for line in ran["stdout"].splitlines()] == ["no ", "no "]
    assert lab.dialled(ALLOWED) == before


def test_ak_P18_metadata_is_never_reachable(make: Callable[..., Box], lab: Lab) -> None:
    """Refuse metadata names and addresses to a sandbox that may reach everything public."""
    lab.inet.records["sneaky.example"] = ["169.254.169.254"]
    lab.inet.records["metadata.google.internal"] = ["169.254.169.254"]
    box = make(hosts=["*"])
    urls = ("http://169.254.169.254/", "http://metadata.google.internal/", "http://sneaky.example/")
    ran = box.run(client + f"[print(fetch(url)) for url in {urls!r}]")
    assert [line[:3] for line in ran["stdout"].splitlines()] == ["no "] * 3
    assert lab.dialled("169.254.169.254") == 0
    assert box.run(client + "print(fetch('http://b.example/'))")["stdout"].startswith("got")


@pytest.mark.parametrize(
    "bad",
    ["http://x.example", "a b.example", "a\0.example", "x.example:0", "x.example:70000", "x.example:http", "*.com", "", "1.2.3.4",
     "[::1]", "ex_ample..com", "-x.example", "a" * 300],
)  # fmt: skip
def test_bad_hosts_are_refused(lab: Lab, bad: str) -> None:
    """Answer a malformed host with invalid_argument, and make nothing."""
    before = len(lab.get("/v1/sandboxes")["sandboxes"])
    with pytest.raises(Failed) as failed:
        lab.post("/v1/sandboxes", {"hosts": [bad]})
    assert failed.value.code == "invalid_argument"
    assert len(lab.get("/v1/sandboxes")["sandboxes"]) == before


def test_a_bad_change_changes_nothing(make: Callable[..., Box], lab: Lab) -> None:
    """Keep the old list when a new one is wrong, too long or contradictory."""
    box = make(hosts=["a.example"])
    many = [f"h{number}.example" for number in range(10_000)]
    for change in (
        {"add": ["http://x"]},
        {"hosts": many},
        {"hosts": [], "add": ["x.example"]},
        {"host": ["x.example"]},
    ):
        with pytest.raises(Failed) as failed:
            hosts(box, **change)
        assert failed.value.code == "invalid_argument"
    assert box.info()["hosts"] == ["a.example"]
    assert box.run(client + "print(fetch('http://a.example/'))")["stdout"].startswith("got")


def test_lookalikes_are_one_name(make: Callable[..., Box]) -> None:
    """Store a host in its ASCII form, so that what is shown is what is allowed."""
    box = make(hosts=["BÜCHER.example", "A.Example."])
    assert box.info()["hosts"] == ["xn--bcher-kva.example", "a.example"]


def test_private_answers_are_refused(make: Callable[..., Box], lab: Lab) -> None:
    """Refuse an allowed name whose address is private, and say so."""
    lab.inet.records["inner.example"] = ["10.1.2.3"]
    box = make(hosts=["inner.example", "a.example"])
    assert box.run(client + "print(fetch('http://inner.example/'))")["stdout"].startswith("no ")
    assert lab.dialled("10.1.2.3") == 0
    until(lambda: any(event["name"] == "inner.example" for event in lab.blocked(box)), "the refusal is logged")


def test_events_can_be_followed(make: Callable[..., Box], lab: Lab) -> None:
    """Stream refusals of all sandboxes as they happen."""
    box = make(hosts=[])
    last = max((event["seq"] for event in lab.get("/v1/egress/log?limit=10000")["events"]), default=0)
    stream = lab.stream(f"/v1/egress/log?follow=1&after={last}")
    assert json.loads(next(stream)[1]) == {"following": True}
    box.run(client + "fetch('http://follow.example/')")
    for _, payload in stream:
        event = json.loads(payload)
        if event["sandbox_id"] == box.id:
            assert event["name"] == "follow.example"
            break
    stream.close()


def test_host_access_opens_one_port(make: Callable[..., Box], lab: Lab) -> None:
    """Reach exactly the named loopback port of the machine, by name, also with an empty list."""
    with lab.listener() as open_port, lab.listener() as other:
        port, closed = open_port.getsockname()[1], other.getsockname()[1]
        box = make(hosts=[], host_ports=[port])
        code = f"""
import socket
def reach(where, port):
    try:
        with socket.create_connection((where, port), 20) as sock:
            sock.sendall(b"hello")
            return "got"
    except OSError:
        return "no"
print(reach("host.atoll.internal", {port}), reach("host.atoll.internal", {closed}), reach("127.0.0.1", {port}))
"""
        assert box.run(code)["stdout"].split() == ["got", "no", "no"]
        connection, _ = open_port.accept()
        with connection:
            connection.settimeout(60)
            assert connection.recv(5) == b"hello"
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()


def test_the_operators_authority_is_trusted(make: Callable[..., Box], runtime: str) -> None:
    """Verify a server signed by the operator's CA from Python, curl and Node without a word from the user."""
    box = make(hosts=["a.example"])
    ran = box.run("""
import socket, ssl
context = ssl.create_default_context()
context.check_hostname = False  # its certificate is for *.example, which is too wide for names; the chain is what counts
with socket.create_connection(("a.example", 443), 20) as plain:
    with context.wrap_socket(plain, server_hostname="a.example") as secure:
        secure.sendall(b"x")
        print(secure.recv(10))
""")
    assert ran["stdout"].strip() == "b'tls:x'", ran
    node = box.exec(
        "command -v node >/dev/null || { echo tls:x; exit; }\n"
        'node -e \'const c = require("tls").connect(443, "a.example", {servername: "a.example", '
        'checkServerIdentity: () => undefined}, () => c.write("x"));'
        ' c.on("data", d => { console.log(String(d)); c.destroy() }); c.on("error", e => console.log(e.code))\''
    )
    assert node["stdout"].strip() == "tls:x", node
    told = box.exec("test -s /etc/ssl/certs/ca-certificates.crt && echo $SSL_CERT_FILE $REQUESTS_CA_BUNDLE")
    assert told["stdout"].split() == ["/etc/ssl/certs/ca-certificates.crt"] * 2


def test_two_lists_at_once(make: Callable[..., Box], lab: Lab) -> None:
    """Tell two sandboxes apart that speak to the same address by different names."""
    lab.inet.records["twin.example"] = [OTHER]
    first, second = make(hosts=["b.example"]), make(hosts=["twin.example"])
    code = client + "print(tls('b.example')); print(tls('twin.example'))"
    assert [line[:3] for line in first.run(code)["stdout"].splitlines()] == ["got", "no "]
    assert [line[:3] for line in second.run(code)["stdout"].splitlines()] == ["no ", "got"]


def test_narrowing_a_parent_narrows_its_sub_agents(make: Callable[..., Box], lab: Lab) -> None:
    """F2-M6: what is taken from a parent is cut in its sub-agents, open connections too, and they cannot take it back."""
    box = make(hosts=["a.example", "b.example"])
    child = Box(lab, lab.post(f"{box.path}/subagents", {})["id"])
    code = client + "[print(fetch(f'http://{name}.example/')) for name in 'ab']"
    assert child.run(code)["stdout"].splitlines() == ["got hello from a.example", "got hello from b.example"]
    lab.post(f"{box.path}/hosts", {"hosts": ["b.example"]})
    assert lab.get(f"{child.path}/hosts")["hosts"] == ["b.example"]
    assert child.run(code)["stdout"].splitlines() == ["no gaierror", "got hello from b.example"]
    with pytest.raises(Failed, match="permission_denied"):
        lab.post(f"{child.path}/hosts", {"add": ["a.example"]})
    lab.post(f"{box.path}/hosts", {"hosts": []})
    assert lab.get(f"{child.path}/hosts")["hosts"] == []
