"""Login: certificates instead of keys, against the real gateway."""

import os
import secrets
import stat

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from atoll import errors
from atoll.client.route import find_route
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc
from atoll.server.tls import Authority, fingerprint
from atoll.surfaces.k8e.sdk._sync.client import SandboxClient
from atoll.surfaces.k8e.sdk.login import log_in, renew_if_due, reset

from .test_rpcs import code
from .test_tls import request


def ask_for_one(stub) -> tuple[tuple[bytes, bytes], object]:
    key = ec.generate_private_key(ec.SECP256R1())
    answer = stub.Login(csr=request(key, "somebody-else"), device_name="laptop", client_version="1")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (pem, answer.cert.encode()), answer


def test_login_gives_the_same_identity(gateway) -> None:
    name = f"dev-{secrets.token_hex(4)}"
    stub = gateway.stub(gateway.key(name, ttl_days=None).secret)
    pair, answer = ask_for_one(stub)
    assert answer.valid_days == 90
    assert answer.ca_cert.encode() == gateway.ca
    cert = x509.load_pem_x509_certificate(answer.cert.encode())
    assert [a.value for a in cert.subject] == [name]
    session = stub.CreateSession(memory_mb=128).session_id
    mtls = sandbox_pb2_grpc.SandboxServiceStub(gateway.channel(pair))
    seen = mtls.ListSessions(pb.ListSessionsRequest(), timeout=60)
    assert [one.session_id for one in seen.sessions] == [session]
    # A certificate may be renewed by itself.
    again = mtls.Login(pb.LoginRequest(csr=request(ec.generate_private_key(ec.SECP256R1()))), timeout=60)
    assert again.cert != answer.cert
    stub.DestroySession(session_id=session)


def test_k8e_D18_revoked_credentials_cannot_renew_and_restart_changes_nothing(gateway) -> None:
    name = f"dev-{secrets.token_hex(4)}"
    stub = gateway.stub(gateway.key(name).secret)
    pair, answer = ask_for_one(stub)
    other, _ = ask_for_one(stub)
    finger = fingerprint(x509.load_pem_x509_certificate(answer.cert.encode()))
    authority = Authority(gateway.home / "tls")
    authority.ensure()
    authority.revoke(finger)

    def login_with(used) -> grpc.StatusCode:
        rpc = sandbox_pb2_grpc.SandboxServiceStub(gateway.channel(used))
        with pytest.raises(grpc.RpcError) as caught:
            rpc.Login(pb.LoginRequest(csr=request(ec.generate_private_key(ec.SECP256R1()))), timeout=60)
        return caught.value.code()

    assert login_with(pair) is grpc.StatusCode.PERMISSION_DENIED
    gateway.restart()
    assert login_with(pair) is grpc.StatusCode.PERMISSION_DENIED
    gateway.revoke(name)
    assert login_with(other) is grpc.StatusCode.UNAUTHENTICATED


def test_login_needs_a_key_and_a_request(gateway, local) -> None:
    good = request(ec.generate_private_key(ec.SECP256R1()))
    assert code(local.Login, csr=good) == "FAILED_PRECONDITION"
    stub = gateway.stub(gateway.key(f"dev-{secrets.token_hex(4)}").secret)
    for bad in ("", "x", "x" * 100_000):
        assert code(stub.Login, csr=bad) == "INVALID_ARGUMENT"


@pytest.fixture
def away(gateway, monkeypatch, tmp_path):
    """Another machine: no local daemon's files, only the CA an operator handed out."""
    for name in list(os.environ):
        if name.startswith(("K8E_SANDBOX_", "ATOLL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("K8E_SANDBOX_CERT_DIR", str(tmp_path / "certs"))
    ca = tmp_path / "ca.crt"
    ca.write_bytes(gateway.ca)
    return str(ca)


def test_a_client_logs_in_once_and_needs_no_key_any_more(gateway, away, monkeypatch, tmp_path) -> None:
    name = f"dev-{secrets.token_hex(4)}"
    key = gateway.key(name).secret
    with pytest.raises(errors.DaemonUnreachable):
        log_in(gateway.endpoint, key)  # nobody vouches for the server: the key stays here
    made = log_in(gateway.endpoint, key, ca_cert=away, device_name="laptop")
    assert (made.name, made.valid_days) == (name, 30)
    files = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "certs").iterdir()}
    assert files == {"ca.crt": 0o644, "client.crt": 0o644, "client.key": 0o600, "endpoint": 0o644}
    assert key not in "".join(p.read_text() for p in (tmp_path / "certs").iterdir())
    with SandboxClient(gateway.endpoint) as client:
        session = client.create_session()
        assert [s.session_id for s in client.list_sessions()] == [session]
        client.destroy_session(session)
    assert renew_if_due(gateway.endpoint) is None  # it is from today
    # The pair is for that endpoint only.
    assert find_route("127.0.0.1:1").pair is None
    assert find_route(gateway.endpoint).pair is not None
    assert sorted(reset()) == sorted(files)
    assert reset() == []
    assert find_route(gateway.endpoint).pair is None


def test_renewal(gateway, away, monkeypatch) -> None:
    made = log_in(gateway.endpoint, gateway.key(f"dev-{secrets.token_hex(4)}", ttl_days=20).secret, ca_cert=away)
    assert made.valid_days == 20
    before = (made.directory / "client.crt").read_bytes()
    assert renew_if_due(gateway.endpoint) is None
    assert renew_if_due(gateway.endpoint, 0) is not None
    assert (made.directory / "client.crt").read_bytes() != before
    gateway.revoke(made.name)
    kept = (made.directory / "client.crt").read_bytes()
    assert renew_if_due(gateway.endpoint, 0) is None
    assert (made.directory / "client.crt").read_bytes() == kept
    with SandboxClient(gateway.endpoint) as client, pytest.raises(errors.Unauthenticated):
        client.list_sessions()


def test_login_has_no_local_form() -> None:
    for endpoint in ("", "unix:/x"):
        with pytest.raises(errors.InvalidArgument):
            log_in(endpoint, "key")
