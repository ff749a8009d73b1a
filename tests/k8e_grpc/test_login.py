"""Login: certificates instead of keys, against the real gateway."""

import secrets

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.gateway.pb.sandbox.v1 import sandbox_pb2 as pb
from atoll.gateway.pb.sandbox.v1 import sandbox_pb2_grpc
from atoll.gateway.tls import Authority, fingerprint

from .test_rpcs import code
from .test_tls import request


def log_in(stub) -> tuple[tuple[bytes, bytes], object]:
    key = ec.generate_private_key(ec.SECP256R1())
    answer = stub.Login(csr=request(key, "somebody-else"), device_name="laptop", client_version="1")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (pem, answer.cert.encode()), answer


def test_login_gives_the_same_identity(gateway) -> None:
    name = f"dev-{secrets.token_hex(4)}"
    stub = gateway.stub(gateway.key(name, ttl_days=None).secret)
    pair, answer = log_in(stub)
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
    pair, answer = log_in(stub)
    other, _ = log_in(stub)
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
