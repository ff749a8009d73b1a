"""`login`: a client certificate from a gateway, kept where the SDK and the CLI find it, renewed before it ends.

The certificate directory holds `ca.crt`, `client.crt`, `client.key` (0600) and `endpoint`, a stamp that says which gateway
they are for; they are used for no other.
"""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from atoll.client.route import Route, certificate_directory, days_left, find_route, parse_endpoint, setting
from atoll.errors import AtollError, InvalidArgument
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc

from ..grpc.status import error_of
from .channel import metadata, open_channel

RENEW_BELOW_DAYS = 30
FILES = ("ca.crt", "client.crt", "client.key", "endpoint")
_SECONDS = 60.0


@dataclass(frozen=True)
class LoggedIn:
    endpoint: str
    directory: Path
    name: str
    valid_days: int


def log_in(endpoint: str, api_key: str | None = None, *, device_name: str = "", ca_cert: str | None = None) -> LoggedIn:
    """Ask for a certificate with a key (or with the certificate there is) and keep it."""
    if endpoint.startswith("unix:") or not endpoint:
        raise InvalidArgument("login needs the endpoint of a gateway", hint="for example --endpoint 10.0.0.1:50051")
    return _log_in(find_route(endpoint, api_key, ca_cert), device_name)


def renew_if_due(endpoint: str, min_age_days: float = 1.0) -> LoggedIn | None:
    """Renew a certificate that ends within 30 days, at most once a day: one of a short-lived key is always close to its end.
    None: there is none for this endpoint, it is not due, or renewing failed; the old one is used for as long as it lasts."""
    route = find_route(endpoint)
    if route.pair is None or not 0 < days_left(route.pair[1]) < RENEW_BELOW_DAYS:
        return None
    started = x509.load_pem_x509_certificate(route.pair[1]).not_valid_before_utc
    if datetime.now(UTC) - started < timedelta(days=min_age_days):
        return None
    try:
        return _log_in(route, "")
    except AtollError:
        return None


def reset(directory: Path | None = None) -> list[str]:
    """Remove the four files; those that were there. Nothing else in the directory is touched."""
    place = directory or certificate_directory()
    removed = []
    for name in FILES:
        try:
            (place / name).unlink()
        except FileNotFoundError:
            continue
        removed.append(name)
    return removed


def _log_in(route: Route, device_name: str) -> LoggedIn:
    key = ec.generate_private_key(ec.SECP256R1())
    device = device_name or setting("DEVICE_NAME") or socket.gethostname()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    request = pb.LoginRequest(
        csr=csr.public_bytes(serialization.Encoding.PEM).decode(),
        device_name=device,
        client_version=f"atoll python {platform.python_version()}",
    )
    answer = _ask(route, request)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    cert = x509.load_pem_x509_certificate(answer.cert.encode())
    host, port = parse_endpoint(route.endpoint)
    directory = certificate_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The stamp goes first and comes back last: half-written files are never taken for a pair.
    (directory / "endpoint").unlink(missing_ok=True)
    _write(directory / "client.key", pem, 0o600)
    _write(directory / "client.crt", answer.cert.encode(), 0o644)
    _write(directory / "ca.crt", answer.ca_cert.encode(), 0o644)
    _write(directory / "endpoint", f"{host}:{port}\n".encode(), 0o644)
    name = str(cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    return LoggedIn(route.endpoint, directory, name, answer.valid_days)


def _ask(route: Route, request: Any) -> Any:
    if route.path:
        raise InvalidArgument("login goes over TLS")
    with open_channel(route, grpc.insecure_channel, grpc.secure_channel) as channel:
        try:
            stub: Any = sandbox_pb2_grpc.SandboxServiceStub(channel)
            return stub.Login(request, timeout=_SECONDS, metadata=metadata(route))
        except grpc.RpcError as failure:
            raise error_of(failure, acted=False) from None


def _write(path: Path, data: bytes, mode: int) -> None:
    fresh = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "wb") as out:
        os.fchmod(out.fileno(), mode)
        out.write(data)
    os.replace(fresh, path)
