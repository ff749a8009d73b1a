"""`network: true`: the machine's named services answer at the gateway, nothing else of it does."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lab.functions import FunctionLab
from lab.sandboxes import RUNTIMES

FETCH = """
import socket, sys, urllib.request as u
try:
    print(u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=20).read().decode())
except Exception as error:
    print("no", type(getattr(error, "reason", error)).__name__)
"""


class Service:
    """A server on this machine's loopback."""

    def __init__(self, word: str) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(word.encode())

            def log_message(self, *args: Any) -> None:
                return None

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def services() -> Iterator[tuple[Service, Service]]:
    made = Service("named"), Service("hidden")
    yield made
    for one in made:
        one.close()


def fetch(fn: FunctionLab, sandbox: str, url: str) -> str:
    answer = fn("sandbox::exec", sandbox_id=sandbox, argv=["python3", "-c", FETCH, url], timeout_ms=60_000)
    return str(answer["stdout"]).strip()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_iii_Q22_D2_only_named_ports_of_the_machine_answer(
    own_fn: FunctionLab, services: tuple[Service, Service], runtime: str
) -> None:
    """Reach a service whose URL the boot environment names and whose port the operator opened, and no other one."""
    fn = own_fn
    fn.configure(host_ports=[services[0].port], isolation=runtime)
    if not fn.ask("GET", "/v1/egress")[1]["works"]:
        pytest.skip("egress does not work here")
    named, hidden = services
    env = {"API": f"http://localhost:{named.port}/x", "PLAIN": f"localhost:{hidden.port}"}
    sandbox = fn.create(network=True, env=env)["sandbox_id"]
    try:
        seen = fn.sh(sandbox, "echo $API; echo $PLAIN")["stdout"].splitlines()
        assert seen[0].endswith(f":{named.port}/x") and "localhost" not in seen[0] and seen[1] == env["PLAIN"]
        assert fetch(fn, sandbox, seen[0]) == "named"
        gateway = seen[0].partition("://")[2].partition(":")[0]
        for url in (
            f"http://{gateway}:{hidden.port}/",
            f"http://127.0.0.1:{named.port}/",
            "http://169.254.169.254/latest/",
            f"http://10.0.0.1:{named.port}/",
        ):
            assert fetch(fn, sandbox, url).startswith("no "), url
        assert fn.sh(sandbox, "echo $API", env={"API": "http://localhost:1"})["stdout"] == "http://localhost:1\n"
    finally:
        fn("sandbox::stop", sandbox_id=sandbox)


def test_iii_network_off_has_no_way_out(fn: FunctionLab, services: tuple[Service, Service]) -> None:
    """Without network change nothing in the environment and reach nothing."""
    named, _ = services
    url = f"http://localhost:{named.port}/"
    sandbox = fn.create(env={"API": url})["sandbox_id"]
    assert fn.sh(sandbox, "echo $API; ls /sys/class/net")["stdout"].split() == [url, "lo"]
    assert fetch(fn, sandbox, url).startswith("no ")
    fn("sandbox::stop", sandbox_id=sandbox)


def test_iii_run_with_network_uses_the_rewritten_environment(
    own_fn: FunctionLab, services: tuple[Service, Service]
) -> None:
    """Let a one-shot snippet reach the service its environment names."""
    fn = own_fn
    fn.configure(host_ports=[services[0].port])
    if not fn.ask("GET", "/v1/egress")[1]["works"]:
        pytest.skip("egress does not work here")
    code = FETCH.replace("sys.argv[1]", "__import__('os').environ['API']")
    env = [f"API=http://127.0.0.1:{services[0].port}"]
    done = fn("sandbox::run", image="python", lang="python", code=code, network=True, env=env)
    assert done["stdout"] == "named\n", done


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_iii_text_in_a_value_opens_no_port_of_the_machine(
    own_fn: FunctionLab, services: tuple[Service, Service], runtime: str
) -> None:
    """F2-M2: without the operator's list no URL opens a port, and text that mentions one never does."""
    fn = own_fn
    fn.configure(isolation=runtime)
    if not fn.ask("GET", "/v1/egress")[1]["works"]:
        pytest.skip("egress does not work here")
    url = f"http://localhost:{services[0].port}/"
    env = {"URL": url, "TASK": f"please read {url} and tell"}
    sandbox = fn.create(network=True, env=env)["sandbox_id"]
    try:
        assert fn.sh(sandbox, "echo $URL; echo $TASK")["stdout"].splitlines() == list(env.values())
        gateway = f"http://host.atoll.internal:{services[0].port}/"
        assert fetch(fn, sandbox, gateway).startswith("no ") and fetch(fn, sandbox, url).startswith("no ")
    finally:
        fn("sandbox::stop", sandbox_id=sandbox)
