"""atoll's own certificate authority: the server certificate, client certificates for `Login`, and revocation.

Everything lies in one directory (`$ATOLL_HOME/tls`, 0700). The authority is P-256 and lives ten years; the server
certificate lives 90 days and is made anew when fewer than 30 are left, when a name is missing from it, or when it does
not belong to the authority. A client certificate is a name and nothing more: whether it still opens the door is asked of
the ledger (`sandbox-issued.json`) and of the key it was issued for, at every call.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import hmac
import ipaddress
import json
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import FailedPrecondition, InvalidArgument

CA_YEARS = 10
LEAF_DAYS = 90
RENEW_BELOW_DAYS = 30
MAX_CSR_BYTES = 16 * 1024
_SKEW = dt.timedelta(minutes=5)  # a client whose clock runs a little behind must not refuse a fresh certificate
_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*\Z", re.I
)

Clock = Callable[[], dt.datetime]


def utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True)
class Issued:
    """One line of the ledger: a client certificate that was handed out."""

    key_name: str
    key_id: str
    fingerprint: str
    issued_at: int
    expires_at: int
    device: str = ""
    revoked_at: int = 0


@dataclass(frozen=True)
class Leaf:
    """The answer of `Login`."""

    cert_pem: str
    ca_pem: str
    valid_days: int
    issued: Issued


class Authority:
    """The authority of one `$ATOLL_HOME`."""

    def __init__(self, directory: Path, *, advertised: str = "", clock: Clock = utc_now) -> None:
        self.directory = directory
        self.clock = clock
        self._names = server_names(advertised)
        self._key: ec.EllipticCurvePrivateKey
        self._cert: x509.Certificate
        self._ledger: dict[str, Issued] = {}
        self._ledger_stamp: tuple[int, int, int] | None = None

    # Files

    @property
    def ca_file(self) -> Path:
        return self.directory / "sandbox-ca.crt"

    @property
    def server_cert_file(self) -> Path:
        return self.directory / "sandbox-server.crt"

    @property
    def server_key_file(self) -> Path:
        return self.directory / "sandbox-server.key"

    @property
    def ca_pem(self) -> str:
        return _cert_pem(self._cert).decode()

    def ensure(self) -> bool:
        """Make what is missing or about to expire; True when the server certificate is a new one."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.directory, 0o700)
        with self._locked():
            self._load_or_make_ca()
            self._link_ca()
            if self._server_is_good():
                return False
            self._make_server()
            return True

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer, HTTP/1.1 and HTTP/2; a client certificate is welcome, and if shown it must be one of ours."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.server_cert_file, self.server_key_file)
        context.load_verify_locations(cadata=self.ca_pem)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.set_alpn_protocols(["http/1.1", "h2"])  # in our order: a client that offers both is not gRPC's
        # With tickets a client could resume a session after its certificate has expired or been revoked.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        return context

    # Client certificates

    def issue(self, csr_pem: str, key_name: str, key_id: str, *, device: str = "", until: int | None = None) -> Leaf:
        """Sign a client's P-256 request. The name in it is ignored: the common name is the key's, so it cannot be chosen."""
        public = _public_key_of(csr_pem)
        now = self.clock()
        not_after = now + dt.timedelta(days=LEAF_DAYS)
        if until is not None:
            not_after = min(not_after, dt.datetime.fromtimestamp(until, dt.UTC))
        if not_after <= now:
            raise FailedPrecondition("the key has expired; no certificate can outlive it")
        cert = (
            _builder(self._cert.subject, _name(key_name), public, now - _SKEW, not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(_authority_id(self._key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        line = Issued(
            key_name, key_id, fingerprint(cert), int(now.timestamp()), int(not_after.timestamp()), device[:128]
        )
        with self._locked():
            self._read_ledger()
            self._write_ledger({**self._ledger, line.fingerprint: line})
        days = max(1, round((not_after - now) / dt.timedelta(days=1)))
        return Leaf(_cert_pem(cert).decode(), self.ca_pem, days, line)

    def issued(self) -> list[Issued]:
        self._read_ledger()
        return sorted(self._ledger.values(), key=lambda line: (line.issued_at, line.fingerprint))

    def find(self, finger: str) -> Issued | None:
        """The ledger's line for a certificate, revoked or not; None for one this authority never noted."""
        self._read_ledger()
        return self._ledger.get(finger)

    def revoke(self, finger: str) -> Issued | None:
        """Revoke one certificate; None when it is unknown. Repeating it changes nothing."""
        return next(iter(self._revoke_where(lambda line: hmac.compare_digest(line.fingerprint, finger.lower()))), None)

    def revoke_key(self, key_id: str) -> list[Issued]:
        """Revoke every certificate that was issued for a key."""
        return self._revoke_where(lambda line: line.key_id == key_id)

    def _revoke_where(self, chosen: Callable[[Issued], bool]) -> list[Issued]:
        now = int(self.clock().timestamp())
        with self._locked():
            self._read_ledger()
            hit = [
                line if line.revoked_at else replace(line, revoked_at=now)
                for line in self._ledger.values()
                if chosen(line)
            ]
            if hit:
                self._write_ledger({**self._ledger, **{line.fingerprint: line for line in hit}})
        return hit

    # The ledger: read again whenever the file changed, so that a revocation by another process counts at once

    @property
    def _ledger_file(self) -> Path:
        return self.directory / "sandbox-issued.json"

    def _read_ledger(self) -> None:
        try:
            seen = os.stat(self._ledger_file)
        except FileNotFoundError:
            self._ledger, self._ledger_stamp = {}, None
            return
        stamp = (seen.st_ino, seen.st_mtime_ns, seen.st_size)
        if stamp == self._ledger_stamp:
            return
        try:
            lines = json.loads(self._ledger_file.read_bytes())["issued"]
            self._ledger = {line["fingerprint"]: Issued(**line) for line in lines}
        except (ValueError, KeyError, TypeError) as broken:
            # Fail closed: without the ledger nobody can tell who was revoked.
            raise FailedPrecondition(f"the list of issued certificates is damaged: {self._ledger_file}") from broken
        self._ledger_stamp = stamp

    def _write_ledger(self, lines: dict[str, Issued]) -> None:
        horizon = int((self.clock() - dt.timedelta(days=1)).timestamp())
        kept = {finger: line for finger, line in lines.items() if line.expires_at > horizon}
        text = json.dumps({"version": 1, "issued": [asdict(line) for line in kept.values()]}, indent=1)
        _write(self._ledger_file, text.encode(), 0o600)
        self._ledger_stamp = None
        self._read_ledger()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    # Making certificates

    def _load_or_make_ca(self) -> None:
        key_file = self.directory / "sandbox-ca.key"
        if self.ca_file.exists() and key_file.exists():
            self._cert = x509.load_pem_x509_certificate(self.ca_file.read_bytes())
            self._key = _load_key(key_file)
            os.chmod(key_file, 0o600)
            if _same_key(self._cert.public_key(), self._key) and self._cert.not_valid_after_utc > self.clock():
                return
        key = ec.generate_private_key(ec.SECP256R1())
        now = self.clock()
        name = _name(f"atoll sandbox CA {os.urandom(4).hex()}")
        self._cert = (
            _builder(name, name, key.public_key(), now - _SKEW, now + dt.timedelta(days=365 * CA_YEARS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        self._key = key
        _write(key_file, _key_pem(key), 0o600)
        _write(self.ca_file, _cert_pem(self._cert), 0o644)

    def _link_ca(self) -> None:
        """`ca.crt` is what the file is called on the client's side."""
        link = self.directory / "ca.crt"
        if not link.is_symlink():
            link.unlink(missing_ok=True)
            link.symlink_to(self.ca_file.name)

    def _server_is_good(self) -> bool:
        try:
            cert = x509.load_pem_x509_certificate(self.server_cert_file.read_bytes())
            key = _load_key(self.server_key_file)
            cert.verify_directly_issued_by(self._cert)
            present = set(cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            return False
        left = cert.not_valid_after_utc - self.clock()
        fresh = left >= dt.timedelta(days=RENEW_BELOW_DAYS) and cert.not_valid_before_utc <= self.clock()
        return fresh and _same_key(cert.public_key(), key) and set(self._names) <= present

    def _make_server(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        now = self.clock()
        not_after = min(now + dt.timedelta(days=LEAF_DAYS), self._cert.not_valid_after_utc)
        cert = (
            _builder(self._cert.subject, _name("atoll sandbox gateway"), key.public_key(), now - _SKEW, not_after)
            .add_extension(x509.SubjectAlternativeName(self._names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_authority_id(self._key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(self.server_key_file, _key_pem(key), 0o600)
        _write(self.server_cert_file, _cert_pem(cert), 0o644)


def fingerprint(cert: x509.Certificate) -> str:
    """SHA-256 of the DER form, lower-case hex."""
    return cert.fingerprint(hashes.SHA256()).hex()


def server_names(advertised: str = "") -> list[x509.GeneralName]:
    """Return the names a server certificate must have: loopback, this host, its addresses, and the advertised name or address."""
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    addresses = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1"), *_interface_addresses()]
    host = socket.gethostname().lower()
    if _HOST_NAME.match(host):
        names.append(x509.DNSName(host))
    if advertised:
        try:
            addresses.append(ipaddress.ip_address(advertised))
        except ValueError:
            if not _HOST_NAME.match(advertised):
                raise InvalidArgument(
                    f"the advertised host name {advertised!r} is neither a host name nor an address"
                ) from None
            names.append(x509.DNSName(advertised.lower()))
    names += [x509.IPAddress(address) for address in addresses]
    return list(dict.fromkeys(names))


def _interface_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses of interfaces that are not loopback, from /proc and one ioctl each; link-local ones need a zone and are left out."""
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, name.encode().ljust(256, b"\0"))  # SIOCGIFADDR
            except OSError:
                continue
            found.append(ipaddress.IPv4Address(answer[20:24]))
    try:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found.append(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
    except OSError:
        pass
    return sorted({a for a in found if not (a.is_loopback or a.is_link_local)}, key=lambda a: (a.version, int(a)))


def _public_key_of(csr_pem: str) -> ec.EllipticCurvePublicKey:
    if not csr_pem or len(csr_pem) > MAX_CSR_BYTES:
        raise InvalidArgument("csr must be a PEM certificate request of at most 16 KiB")
    try:
        csr = x509.load_pem_x509_csr(csr_pem.encode())
        signed = csr.is_signature_valid
        public = csr.public_key()
    except (ValueError, TypeError, InvalidSignature) as bad:
        raise InvalidArgument("csr is not a PEM certificate request (PKCS#10)") from bad
    if not signed:
        raise InvalidArgument("the certificate request is not signed by its own key")
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise InvalidArgument("the certificate request must be for a P-256 key")
    return public


def _builder(
    issuer: x509.Name, subject: x509.Name, public: ec.EllipticCurvePublicKey, start: dt.datetime, end: dt.datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(public)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _authority_id(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(digital_signature, False, False, False, False, key_cert_sign, crl_sign, False, False)


def _same_key(public: object, private: ec.EllipticCurvePrivateKey) -> bool:
    mine = private.public_key()
    return isinstance(public, ec.EllipticCurvePublicKey) and public.public_numbers() == mine.public_numbers()


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is not an EC key")
    return key


def _cert_pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file in one step; it never exists with wider rights or half its content."""
    fresh = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as out:
            os.fchmod(out.fileno(), mode)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
