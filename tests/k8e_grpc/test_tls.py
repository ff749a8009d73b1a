"""The authority: real handshakes with the certificates it makes, renewal, Login's leaves, revocation."""

import datetime as dt
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import FailedPrecondition, InvalidArgument
from atoll.server.tls import Authority, fingerprint, utc_now


def request(key, common="root") -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return csr.public_bytes(serialization.Encoding.PEM).decode()


def new_key():
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "tls")
    assert made.ensure()
    return made


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bytes:
    """One real TLS handshake over a socket pair; returns the client certificate the server saw (DER or empty)."""
    left, right = socket.socketpair()
    left.settimeout(30)
    right.settimeout(30)
    seen: list[object] = []

    def serve() -> None:
        try:
            with server.wrap_socket(left, server_side=True) as tls:
                seen.append(tls.getpeercert(binary_form=True) or b"")
                tls.sendall(b"x")
        except (ssl.SSLError, OSError) as error:
            seen.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(right, server_hostname=name) as tls:
            assert tls.recv(1) == b"x"
    finally:
        right.close()
        thread.join(30)
        left.close()
    assert isinstance(seen[0], bytes), seen
    return seen[0]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_handshake_with_only_the_ca(authority: Authority, name: str) -> None:
    """A client that has nothing but the CA verifies chain and host name."""
    client = ssl.create_default_context(cafile=str(authority.ca_file))
    assert handshake(authority.server_context(), client, name) == b""


def test_wrong_host_name_and_foreign_ca_are_refused(authority: Authority, tmp_path: Path) -> None:
    client = ssl.create_default_context(cafile=str(authority.ca_file))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(authority.server_context(), client, "elsewhere.example")
    other = Authority(tmp_path / "other")
    other.ensure()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(other.server_context(), client, "localhost")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_older_than_1_2_is_refused(authority: Authority) -> None:
    client = ssl.create_default_context(cafile=str(authority.ca_file))
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(authority.server_context(), client, "localhost")


def test_file_modes(authority: Authority) -> None:
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in authority.directory.iterdir()}
    assert stat.S_IMODE(authority.directory.stat().st_mode) == 0o700
    assert modes["sandbox-ca.key"] == modes["sandbox-server.key"] == 0o600
    assert modes["sandbox-ca.crt"] == modes["sandbox-server.crt"] == 0o644


def test_second_start_keeps_everything(authority: Authority) -> None:
    before = {p.name: p.read_bytes() for p in authority.directory.iterdir()}
    assert not Authority(authority.directory).ensure()
    assert before == {p.name: p.read_bytes() for p in authority.directory.iterdir()}


@pytest.mark.parametrize(("days", "renewed"), [(59, False), (61, True), (200, True)])
def test_server_certificate_is_renewed_below_30_days(authority: Authority, days: int, renewed: bool) -> None:
    later = Authority(authority.directory, clock=lambda: utc_now() + dt.timedelta(days=days))
    assert later.ensure() is renewed
    assert later.ca_pem == authority.ca_pem


def test_clock_skew_of_minutes_is_forgiven(authority: Authority) -> None:
    """Everything that is issued counts from a little earlier on, for a client whose clock is behind the gateway's."""
    leaf = authority.issue(request(new_key()), "ci", "id")
    behind = authority.clock() - dt.timedelta(minutes=4)
    for pem in (leaf.cert_pem, leaf.ca_pem, authority.server_cert_file.read_text()):
        assert x509.load_pem_x509_certificate(pem.encode()).not_valid_before_utc <= behind


def test_missing_name_and_foreign_or_broken_files_are_replaced(authority: Authority, tmp_path: Path) -> None:
    named = Authority(authority.directory, advertised="gateway.example")
    assert named.ensure()
    cert = x509.load_pem_x509_certificate(named.server_cert_file.read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "gateway.example" in names.get_values_for_type(x509.DNSName)
    other = Authority(tmp_path / "other")
    other.ensure()
    named.server_cert_file.write_bytes(other.server_cert_file.read_bytes())
    assert named.ensure()
    named.server_key_file.write_bytes(b"garbage")
    assert named.ensure()
    client = ssl.create_default_context(cafile=str(named.ca_file))
    handshake(named.server_context(), client, "gateway.example")


@pytest.mark.parametrize("bad", ["a b", "-x", "x..y", "host:50051", "http://h", "a" * 300, "x\n", "*"])
def test_bad_advertised_name_aborts(tmp_path: Path, bad: str) -> None:
    with pytest.raises(InvalidArgument):
        Authority(tmp_path, advertised=bad)


def login(
    authority: Authority, tmp_path: Path, name: str = "ci", key_id: str = "k1", **options
) -> tuple[ssl.SSLContext, str]:
    key = new_key()
    leaf = authority.issue(request(key), name, key_id, **options)
    (tmp_path / "c.crt").write_text(leaf.cert_pem)
    (tmp_path / "c.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    client = ssl.create_default_context(cadata=leaf.ca_pem)
    client.load_cert_chain(tmp_path / "c.crt", tmp_path / "c.key")
    return client, leaf.issued.fingerprint


def test_login_leaf(authority: Authority, tmp_path: Path) -> None:
    """The leaf is for clients only, lives 90 days, and carries the key's name whatever the request asked for."""
    client, finger = login(authority, tmp_path)
    der = handshake(authority.server_context(), client, "localhost")
    cert = x509.load_der_x509_certificate(der)
    assert fingerprint(cert) == finger
    assert [a.value for a in cert.subject] == ["ci"]
    assert list(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    life = cert.not_valid_after_utc - utc_now()
    assert dt.timedelta(days=89) < life <= dt.timedelta(days=90)


def test_leaf_cannot_act_as_server_or_ca(authority: Authority, tmp_path: Path) -> None:
    login(authority, tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "c.crt", tmp_path / "c.key")
    client = ssl.create_default_context(cafile=str(authority.ca_file))
    client.check_hostname = False
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client, "localhost")


def test_self_made_client_certificate_fails_the_handshake(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    other.ensure()
    client, _ = login(other, tmp_path)
    client.load_verify_locations(cafile=str(authority.ca_file))
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(authority.server_context(), client, "localhost")


def test_leaf_never_outlives_its_key(authority: Authority) -> None:
    now = int(utc_now().timestamp())
    leaf = authority.issue(request(new_key()), "ci", "k", until=now + 10 * 86400)
    assert leaf.valid_days == 10
    assert leaf.issued.expires_at == now + 10 * 86400
    with pytest.raises(FailedPrecondition):
        authority.issue(request(new_key()), "ci", "k", until=now - 1)


def hostile_requests() -> dict[str, str]:
    good = request(new_key())
    p384 = request(ec.generate_private_key(ec.SECP384R1()))
    lines = good.splitlines()
    body = list(lines[-3])
    body[-5] = "A" if body[-5] != "A" else "B"
    forged = "\n".join([*lines[:-3], "".join(body), *lines[-2:]])
    return {
        "empty": "",
        "text": "hello",
        "huge": "A" * 100_000,
        "nul": "\0" * 10,
        "not ascii": "日本" * 10,
        "rsa": request(rsa.generate_private_key(65537, 2048)),
        "p384": p384,
        "bad signature": forged,
    }


@pytest.mark.parametrize("kind", sorted(hostile_requests()))
def test_bad_requests_are_refused(authority: Authority, kind: str) -> None:
    with pytest.raises(InvalidArgument):
        authority.issue(hostile_requests()[kind], "ci", "k")
    assert authority.issued() == []


def test_revocation_survives_a_restart_and_is_seen_by_a_running_authority(authority: Authority, tmp_path: Path) -> None:
    _, first = login(authority, tmp_path)
    _, second = login(authority, tmp_path, key_id="k2")
    assert authority.find(first).revoked_at == 0
    elsewhere = Authority(authority.directory)
    elsewhere.ensure()
    assert elsewhere.revoke(first.upper()).revoked_at > 0
    assert elsewhere.revoke("00" * 32) is None
    assert authority.find(first).revoked_at > 0
    assert authority.find(second).revoked_at == 0
    assert [line.fingerprint for line in authority.revoke_key("k2")] == [second]
    again = Authority(authority.directory)
    again.ensure()
    assert {line.fingerprint for line in again.issued() if line.revoked_at} == {first, second}


def test_damaged_ledger_opens_no_door(authority: Authority, tmp_path: Path) -> None:
    _, finger = login(authority, tmp_path)
    (authority.directory / "sandbox-issued.json").write_text("{")
    with pytest.raises(FailedPrecondition):
        authority.find(finger)
