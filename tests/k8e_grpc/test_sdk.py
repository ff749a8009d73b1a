"""SandboxClient, sandbox_session and their async twins: the documents' examples, credentials, errors, threads."""

import asyncio
import inspect
import os
import secrets
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvloop
from lab.lossy_proxy import LossyProxy

from atoll import errors
from atoll.client.route import find_route, parse_endpoint
from atoll.client.tls import make_context
from atoll.surfaces.k8e.sdk._async.client import AsyncSandboxClient, async_sandbox_session
from atoll.surfaces.k8e.sdk._sync.client import SandboxClient, sandbox_session
from atoll.surfaces.k8e.sdk.wire import ExecResult, Replaced

pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture
def here(gateway, monkeypatch: pytest.MonkeyPatch):
    """The environment of a user of this gateway's home."""
    for name in list(os.environ):
        if name.startswith(("K8E_SANDBOX_", "ATOLL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATOLL_HOME", str(gateway.home))
    monkeypatch.setenv("HOME", str(gateway.home / "nowhere"))
    return gateway


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


def test_k8e_P44_hello(here) -> None:
    with SandboxClient() as c:
        done = c.run("print('hello')", language="python")
    assert (done.stdout, done.exit_code) == ("hello\n", 0)
    assert ExecResult("a", "b", 1).exit_code == 1


def test_k8e_P45_the_three_examples(here) -> None:
    with SandboxClient() as c:
        line = "import random; n = [random.random() for _ in range(10)]; print(n, sum(n) / len(n))"
        assert len(c.run(line, "python").stdout.split()) == 11
        c.run("echo 41 > kept", "bash")
        assert c.run("print(int(open('kept').read()) + 1)", "python").stdout == "42\n"
    with (
        pytest.raises(errors.AtollError, match="kata"),
        sandbox_session(runtime_class="kata", allowed_hosts=["github.com"]),
    ):
        pass
    with sandbox_session(runtime_class="container", allowed_hosts=["github.com"]) as (client, sid):
        client.write_file(sid, "/workspace/main.py", "print('from file')\n")
        assert client.exec(sid, "python3 main.py").stdout == "from file\n"
        assert client.get_session(sid).allowed_hosts == ("github.com",)
    with SandboxClient() as client, pytest.raises(errors.NotFound):
        client.exec(sid, "true")


@pytest.mark.parametrize("way", ["unix", "tls"])
def test_k8e_P32_local_gateway_is_found_and_a_named_one_is_used(here, monkeypatch, way) -> None:
    if way == "tls":
        monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", here.endpoint)
    with SandboxClient() as c:
        assert ("unix:" in c.endpoint) == (way == "unix")
        assert c.run("echo ok").stdout == "ok\n"


def test_k8e_P32_ca_from_the_environment(here, monkeypatch, tmp_path) -> None:
    ca = tmp_path / "ca.crt"
    ca.write_bytes(here.ca)
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", here.endpoint)
    with SandboxClient() as c, pytest.raises(errors.DaemonUnreachable):
        c.run("true")
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(ca))
    with SandboxClient() as c:
        assert c.run("echo ok").stdout == "ok\n"
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(tmp_path / "missing"))
    with pytest.raises(errors.Unavailable, match="missing"):
        SandboxClient()


def test_k8e_D43_key_is_sent_and_a_wrong_one_is_refused(here, monkeypatch) -> None:
    name = f"sdk-{secrets.token_hex(4)}"
    monkeypatch.setenv("K8E_SANDBOX_APIKEY", here.key(name).secret)
    with SandboxClient(here.endpoint) as c:
        c.run("true")
        assert len(c.list_sessions()) == 1
    with SandboxClient(here.endpoint, api_key="wrong") as c, pytest.raises(errors.Unauthenticated):
        c.list_sessions()
    with pytest.raises(errors.InvalidArgument):
        SandboxClient(here.endpoint, api_key="two words")


@pytest.mark.parametrize(
    "code",
    [
        "print('it''s')",
        'print("$HOME `id` \\\\ \\"q\\"")',
        "print('''a\nb''')",
        "print('日本\\u0000')",
        "x = 1\nif x:\n    print('deep')\n",
    ],
)
def test_k8e_D43_quoting_is_exact(here, code, shared_client) -> None:
    import subprocess

    expected = subprocess.run([sys.executable, "-c", code], capture_output=True).stdout
    assert shared_client.run(code, "python").raw_stdout == expected


@pytest.fixture(scope="module")
def shared_client(gateway):
    client = SandboxClient(f"unix:{gateway.home}/grpc.sock")
    yield client
    client.close()


def test_k8e_P12_a_lost_default_session_is_replaced(here) -> None:
    with SandboxClient() as c:
        first = c.default_session()
        here.stub().DestroySession(session_id=first)
        again = c.run("echo again")
        assert again.stdout == "again\n" and c.default_session() != first
        assert again.session_replaced == Replaced(first, "destroyed", "the files")
        assert c.run("true").session_replaced is None, "it is told once"


def test_many_clients_of_a_tenant_share_one_session(here) -> None:
    """They ask at once; one session is made."""
    tenant = f"team-{secrets.token_hex(3)}"
    clients = [SandboxClient(tenant_id=tenant) for _ in range(8)]
    try:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda client: client.default_session(), clients))
        assert len(found) == 1
        assert [one.tenant_id for one in clients[0].list_sessions("all")].count(tenant) == 1
        clients[0].destroy_session(found.pop())
    finally:
        for client in clients:
            client.close()


def test_a_repeated_create_is_the_same_session(here) -> None:
    stub, request = here.stub(), secrets.token_hex(16)
    made = [stub.CreateSession(request_id=request).session_id for _ in range(2)]
    assert made[0] == made[1]
    stub.DestroySession(session_id=made[0])


def test_a_create_whose_answer_is_lost_is_asked_for_again(gateway, tmp_path: Path) -> None:
    mark, made = secrets.token_hex(8), threading.Event()
    stub = gateway.stub()

    def mine() -> list[str]:
        return [one.session_id for one in stub.ListSessions(phase="all").sessions if one.name == f"lost-{mark}"]

    def watch() -> None:
        while not mine():
            threading.Event().wait(0.05)
        made.set()

    proxy = LossyProxy(tmp_path / "p.sock", f"{gateway.home}/grpc.sock", mark.encode(), made)
    threading.Thread(target=watch, daemon=True).start()
    try:
        with SandboxClient(f"unix:{tmp_path}/p.sock") as client:
            session = client.create_session(name=f"lost-{mark}")
            assert mine() == [session]
            assert client.exec(session, "echo alive").stdout == "alive\n"
            client.destroy_session(session)
    finally:
        made.set()
        proxy.close()


def test_a_missing_file_does_not_look_like_a_lost_session(here) -> None:
    with SandboxClient() as c:
        first = c.default_session()
        with pytest.raises(errors.FileNotFound):
            c.exec(first, "true", workdir="/no/such")
        with pytest.raises(errors.FileNotFound):
            c.read_file(first, "/no/such")
        assert c.default_session() == first


def test_close_ends_the_default_session_unless_a_tenant_is_set(here) -> None:
    with SandboxClient() as c:
        gone = c.default_session()
    tenant = f"team-{secrets.token_hex(3)}"
    with SandboxClient(tenant_id=tenant) as c:
        c.run("echo mine > kept")
        kept = c.default_session()
    with SandboxClient(tenant_id=tenant) as c:
        with pytest.raises(errors.NotFound):
            c.get_session(gone)
        assert c.default_session() == kept
        assert c.run("cat kept").stdout == "mine\n"
        c.destroy_session(kept)


def test_files_streams_background_and_pip(here) -> None:
    with sandbox_session() as (c, sid):
        c.write_file(sid, "/workspace/b", b"\0\xff")
        assert c.read_file_bytes(sid, "/workspace/b") == b"\0\xff"
        c.write_file(sid, "/workspace/t", "a")
        c.write_file(sid, "/workspace/t", "b", mode="a")
        assert c.read_file(sid, "/workspace/t") == "ab"
        files = c.list_files(sid)
        assert {f.path for f in files} == {f["path"] for f in files} == {"/workspace/b", "/workspace/t"}
        assert "".join(c.exec_stream(sid, "printf 'a\\n\\nb'; sleep 0.1; echo c")) == "a\n\nbc\n"
        run = c.exec_background(sid, "exit 6")
        while (now := c.poll_run(run)).status in ("started", "running"):
            pass
        assert now.exit_code == 6
        assert c.exec(sid, "sleep 99", timeout=1).status == "timed_out"
        assert c.pip_install(sid, ["./no-such-thing.whl"]).exit_code != 0
        with pytest.raises(errors.InvalidArgument, match="not a package"):
            c.pip_install(sid, ["no-such-thing>=1", "--no-index"])
        assert c.run("exit 9").exit_code == 9


def test_everyday_29_commands_and_files_of_another_user(here) -> None:
    with sandbox_session() as (c, session):
        c.exec(session, "mkdir -m 777 shared; umask 077; echo root > private")
        assert c.exec(session, "id -u", user="nobody").stdout == "65534\n"
        assert "".join(c.exec_stream(session, "id -u", user="65534:65534")) == "65534\n"
        assert c.write_file(session, "/workspace/shared/f", "x", user="nobody")
        assert c.exec(session, "stat -c %u shared/f").stdout == "65534\n"
        assert c.read_file(session, "/workspace/shared/f", user="nobody") == "x"
        assert "/workspace/shared/f" in [one.path for one in c.list_files(session, user="nobody")]
        with pytest.raises(errors.FilePermission):
            c.read_file_bytes(session, "/workspace/private", user="nobody")
        for wrong in ("a b;c", "no-such-user", "é", "x\n"):
            with pytest.raises(errors.InvalidArgument):
                c.read_file(session, "/workspace/private", user=wrong)
            with pytest.raises(errors.InvalidArgument):
                c.exec(session, "true", user=wrong)


def test_leaving_a_stream_kills_its_command(here) -> None:
    with sandbox_session() as (c, sid):
        stream = c.exec_stream(sid, "echo go; exec sleep 5432")
        assert next(stream) == "go\n"
        stream.close()
        deadline = 200
        while "5432" in "".join(p.cmdline for p in here.stub().GetProcesses(session_id=sid).processes):
            deadline -= 1
            assert deadline
            threading.Event().wait(0.2)


def test_one_client_for_many_threads(here) -> None:
    results: list[str] = []
    with SandboxClient() as c:
        threads = [
            threading.Thread(target=lambda n=n: results.append(c.run(f"echo {n}").stdout.strip())) for n in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(map(int, results)) == list(range(16))
        assert len(c.list_sessions()) >= 1


async def test_async_twin(here) -> None:
    async with AsyncSandboxClient() as c:
        outputs = await asyncio.gather(*(c.run(f"print({n})", "python") for n in range(8)))
        assert [o.stdout for o in outputs] == [f"{n}\n" for n in range(8)]
        with pytest.raises(errors.FileNotFound):
            await c.read_file(await c.default_session(), "/none")
    async with async_sandbox_session(endpoint=here.endpoint) as (c, sid):
        await c.write_file(sid, "/workspace/a", b"\xff")
        assert await c.read_file_bytes(sid, "/workspace/a") == b"\xff"
        assert "".join([piece async for piece in c.exec_stream(sid, "echo x; echo y")]) == "x\ny\n"


def test_both_clients_have_the_same_face() -> None:
    def face(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in vars(cls).items()
            if callable(member) and not name.startswith("_")
        }

    assert face(SandboxClient) == face(AsyncSandboxClient)


@pytest.mark.parametrize(
    "bad", ["", ":", "http://h:1", "h:0", "h:70000", "h:x", "a b:1", "[::1", "[zz]:1", "h/x:1", "-h:1", "ü:1"]
)
def test_bad_endpoints(bad) -> None:
    with pytest.raises(errors.InvalidArgument):
        parse_endpoint(bad)


def test_k8e_D19_a_key_never_goes_to_a_server_that_is_not_verified(here, tmp_path, monkeypatch) -> None:
    """Whatever the endpoint, the way is TLS with a checked chain; the host name is waived on loopback alone."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    for endpoint in ("10.0.0.1:50051", "gateway.example", "https://gateway.example:443", "localhost:1", "[::1]:5"):
        route = find_route(endpoint, "k" * 8)
        assert route.port and not route.path
        context = make_context(route)
        assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
        assert (route.server_name != route.host) == (endpoint == "[::1]:5")
        assert route.loopback == (endpoint in ("localhost:1", "[::1]:5"))
        assert "k" * 8 not in repr(route)
    # A server with a certificate of another authority gets nothing.
    with SandboxClient(here.endpoint, api_key="secret-key") as c, pytest.raises(errors.DaemonUnreachable):
        c.list_sessions()


def test_the_modules_old_name(here) -> None:
    import importlib.util

    path = Path(__file__).parents[2] / "sdk/python/sandbox_client.py"
    spec = importlib.util.spec_from_file_location("sandbox_client", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.SandboxClient is SandboxClient
    assert module.sandbox_session is sandbox_session
