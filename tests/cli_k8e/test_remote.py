"""Every verb through a gateway elsewhere: found by flag, environment and profile, trusted only when verified."""

import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from .conftest import Gateway, Machine


def test_k8e_P32_a_remote_gateway_is_chosen_by_environment_or_flag(gateway: Gateway, key: str, bare: Machine) -> None:
    flags = ["sandbox", "--endpoint", gateway.endpoint, "--apikey", key]
    trust = {"K8E_SANDBOX_CERT": gateway.ca}
    first = bare.ok(*flags, "run", "echo there; exit 0", env=trust)
    assert first["stdout"] == "there\n"
    named = {**trust, "K8E_SANDBOX_ENDPOINT": gateway.endpoint, "K8E_SANDBOX_APIKEY": key}
    assert bare.ok("sandbox", "run", "echo again", env=named)["session_id"] == first["session_id"]
    assert bare.ok("sandbox", "status", env=named)["available"] is True
    assert not (bare.root / "a" / "daemon.sock").exists()
    assert bare.ok("sandbox", "destroy", first["session_id"], env=named) == {"ok": True}


def test_k8e_P32_a_local_gateway_is_found_over_tls_without_settings(gateway: Gateway) -> None:
    found = gateway.ok("sandbox", "status", "--endpoint", gateway.endpoint)
    assert found["available"] is True and gateway.ok("sandbox", "status")["available"] is True


def test_the_verbs_people_use_work_from_afar(remote: Machine) -> None:
    session = remote.ok("sandbox", "create", "--env", "A=1")["session_id"]
    try:
        written = remote.ok("sandbox", "write", session, "/workspace/d", stdin=b"\0\xff data")
        assert written["ok"] is True
        assert remote("sandbox", "read", session, "/workspace/d", "--raw").stdout == b"\0\xff data"
        assert [one["path"] for one in remote.ok("sandbox", "list", session)["files"]] == ["/workspace/d"]
        assert remote("sandbox", "run", "--raw", "--session-id", session, "printf x; exit 7").code == 7
        started = remote.ok("sandbox", "run", "echo bg", "--background", "--session-id", session)
        assert remote.ok("sandbox", "poll", started["run_id"], "--follow")["stdout"] == "bg\n"
        assert remote("exec", "-i", session, "cat", stdin=b"piped").stdout == b"piped"
        assert "on a tty" in remote.at_terminal("exec", "-t", session, "sh", "-c", "test -t 1 && echo on a tty")[1]
        assert remote.ok("sandbox", "ps", session)["processes"] is not None
        assert remote.ok("sandbox", "get", session)["phase"] == "Active"
        assert remote.ok("sandbox", "events", session)["returned"] > 0
        assert b"bg" in remote("sandbox", "log", session).stdout
        hosts = remote.ok("sandbox", "allow-hosts", "a.example", "b.example", "--session-id", session)
        assert hosts["allowed_hosts"] == ["a.example", "b.example"]
        assert session in [one["session_id"] for one in remote.ok("sandbox", "sessions")["sessions"]]
    finally:
        assert remote.ok("sandbox", "destroy", session) == {"ok": True}


def test_k8e_P26_P27_errors_from_afar(gateway: Gateway, remote: Machine) -> None:
    gone = remote("sandbox", "run", "true", "--session-id", "sess-nobody")
    assert gone.code == 1 and gone.json["ok"] is False and gone.json["error"] == "not_found" and gone.json["detail"]
    failed = remote("sandbox", "run", "echo bad >&2; exit 9")
    assert failed.code == 9 and failed.json["stderr"] == "bad\n" and failed.json["exit_code"] == 9
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        down = remote("sandbox", "run", "true", "--endpoint", f"127.0.0.1:{taken.getsockname()[1]}")
    assert down.code == 2 and down.json["ok"] is False and down.json["error"] == "daemon_unreachable"
    wrong = remote("sandbox", "sessions", "--apikey", "0" * 64)
    assert wrong.code == 1 and wrong.json["error"] == "unauthenticated"
    one = gateway.key("--quota", "sandboxes=1")
    first = remote.ok("sandbox", "create", "--apikey", one)["session_id"]
    full = remote("sandbox", "create", "--apikey", one)
    assert full.code == 8 and full.json["ok"] is False and full.json["detail"], full
    remote.ok("sandbox", "destroy", first, "--apikey", one)


def test_k8e_P12_a_lost_session_is_replaced_from_afar(remote: Machine) -> None:
    first = remote.ok("sandbox", "run", "echo 1")["session_id"]
    (state,) = (remote.data / "default").glob("at-*/state.json")
    entry = json.loads(state.read_text())
    assert remote.ok("sandbox", "destroy", first) == {"ok": True}
    assert not state.exists()
    state.write_text(json.dumps(entry))  # as if it had ended behind our back
    second = remote.ok("sandbox", "run", "echo 2")
    assert second["stdout"] == "2\n" and second["session_id"] != first
    assert remote.ok("sandbox", "status")["session_id"] == second["session_id"]
    remote.ok("sandbox", "destroy", second["session_id"])


def test_k8e_D34_a_tenants_session_is_found_from_another_machine(gateway: Gateway, remote: Machine) -> None:
    tenant, other = f"t-{os.urandom(4).hex()}", Machine()
    other.env.update({name: value for name, value in remote.env.items() if name.startswith("K8E_")})
    try:
        first = remote.ok("sandbox", "run", "touch mine", "--tenant", tenant)["session_id"]
        assert other.ok("sandbox", "status", "--tenant", tenant)["session_id"] == first
        assert other.ok("sandbox", "run", "ls", "--tenant", tenant)["stdout"] == "mine\n"
        assert other.ok("sandbox", "exposed", "--tenant", tenant)["session_id"] == first
        assert other.ok("sandbox", "status", "--tenant", tenant + "x")["session_id"] == ""
        assert other.ok("sandbox", "destroy", "--tenant", tenant) == {"ok": True}
        replaced = remote.ok("sandbox", "run", "ls", "--tenant", tenant)
        assert replaced["stdout"] == "" and replaced["session_id"] != first
        remote.ok("sandbox", "destroy", "--tenant", tenant)
    finally:
        other.close()


def test_k8e_D34_another_keys_tenant_of_the_same_name_is_another(gateway: Gateway, remote: Machine) -> None:
    tenant = f"t-{os.urandom(4).hex()}"
    mine = remote.ok("sandbox", "run", "true", "--tenant", tenant)["session_id"]
    other = Machine()
    try:
        other.env.update({name: value for name, value in remote.env.items() if name.startswith("K8E_")})
        other.env["K8E_SANDBOX_APIKEY"] = gateway.key()
        assert other.ok("sandbox", "status", "--tenant", tenant)["session_id"] == ""
        theirs = other.ok("sandbox", "run", "true", "--tenant", tenant)["session_id"]
        assert theirs != mine
        other.ok("sandbox", "destroy", theirs)
    finally:
        other.close()
    remote.ok("sandbox", "destroy", mine)


@contextmanager
def listener(context: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[bytes]]]:
    """A server that keeps all that it is sent."""
    heard: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve() -> None:
        server.settimeout(0.2)
        while not stopped.is_set():
            try:
                peer, _ = server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                peer.settimeout(5)
                peer = context.wrap_socket(peer, server_side=True) if context else peer
                heard.append(peer.recv(65536))
            except OSError:
                pass
            finally:
                peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}", heard
    finally:
        stopped.set()
        thread.join(60)
        server.close()


def impostor(directory: Path) -> ssl.SSLContext:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (directory / "c.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (directory / "k.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "c.pem", directory / "k.pem")
    context.set_alpn_protocols(["h2"])
    return context


@pytest.mark.parametrize("verb", [["run", "true"], ["login"], ["connect", "--skip-skill", "--skip-path"]])
@pytest.mark.parametrize("with_ca", [True, False])
def test_k8e_D19_no_key_goes_to_an_impostor(
    verb: list[str], with_ca: bool, gateway: Gateway, bare: Machine, tmp_path: Path
) -> None:
    secret = os.urandom(32).hex()
    env = {"K8E_SANDBOX_APIKEY": secret} | ({"K8E_SANDBOX_CERT": gateway.ca} if with_ca else {})
    for context in (None, impostor(tmp_path)):
        with listener(context) as (endpoint, heard):
            done = bare("sandbox", *verb, "--endpoint", endpoint, env=env)
        assert done.code == 2 and done.json["ok"] is False, done
        assert secret.encode() not in b"".join(heard)
        assert secret not in done.stdout.decode() + done.stderr.decode()
    assert not (bare.data / "config.json").exists() and not (bare.data / "profiles.yaml").exists()


def test_k8e_D19_plaintext_is_refused_before_anything_is_sent(bare: Machine) -> None:
    with listener() as (endpoint, heard):
        done = bare("sandbox", "run", "true", "--endpoint", f"http://{endpoint}", "--apikey", "k" * 64)
    assert done.code == 1 and done.json["error"] == "invalid_argument" and heard == []
