"""Where the gateway is and how it is trusted: endpoint, certificates and key, from arguments, environment and files.

Without any of them the local daemon is meant. Over TCP the chain is always checked; a key or certificate is never sent to a
server that was not verified, and there is no plaintext at all.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..errors import InvalidArgument, Unavailable
from . import spawn

DEFAULT_PORT = 50051
_SERVER_CAS = (
    "/var/lib/k8e/server/tls/sandbox-ca.crt",
    "/var/lib/k8e/server/tls/serving-kube-apiserver.crt",
    "/etc/k8e/tls/serving-kube-apiserver.crt",
)
_KUBECONFIGS = ("/etc/k8e/k8e.yaml", "/var/lib/k8e/server/cred/admin.kubeconfig")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\.?")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True)
class Route:
    """A decided way to a gateway: a host and port over TLS, or the path of a Unix socket."""

    endpoint: str  # as a person wrote it
    host: str = ""
    port: int = 0
    path: str = ""
    local: bool = False  # the Unix socket of the own daemon
    loopback: bool = False
    ca: bytes | None = None  # None: the system's roots
    pair: tuple[bytes, bytes] | None = field(default=None, repr=False)  # (key, certificate)
    api_key: str = field(default="", repr=False)

    @property
    def address(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def server_name(self) -> str:
        """The name the server's certificate has to have.

        On loopback there is nobody in between, and servers seldom have that address in their certificate.
        """
        return "localhost" if self.loopback else self.host.partition("%")[0]


def setting(name: str) -> str:
    """`ATOLL_<name>`, else `K8E_SANDBOX_<name>`."""
    return os.environ.get(f"ATOLL_{name}") or os.environ.get(f"K8E_SANDBOX_{name}") or ""


def find_route(endpoint: str | None = None, api_key: str | None = None, ca_file: str | None = None) -> Route:
    """Decide by the arguments first, then the environment, then what is on this machine."""
    wanted = endpoint or setting("ENDPOINT")
    key = api_key or setting("APIKEY")
    if key and not _KEY.fullmatch(key):
        raise InvalidArgument("an API key is one word of printable characters")
    if wanted.startswith("unix:") or not wanted:
        path = wanted.removeprefix("unix:").removeprefix("//") or os.path.join(spawn.home_directory(), "grpc.sock")
        return Route(wanted or f"unix:{path}", path=path, local=not wanted, api_key=key)
    host, port = parse_endpoint(wanted)
    loopback = is_loopback(host)
    ca, pair = _trust(f"{host}:{port}", loopback, ca_file)
    return Route(wanted, host, port, loopback=loopback, ca=ca, pair=pair, api_key=key)


def parse_endpoint(text: str) -> tuple[str, int]:
    """`host:port`, `host`, `[v6]:port`, with or without `https://`. Plain `http://` is refused."""
    if text.startswith("http://"):
        raise InvalidArgument(f"{text!r:.120}: the gateway is only reached over TLS")
    bare = text.removeprefix("https://").rstrip("/")
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", bare)
    host = (found[1] or found[2]) if found else ""
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if found and found[1]:
        try:
            ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError:
            host = ""
    elif not _HOST.fullmatch(host):
        host = ""
    if not host or not 1 <= port <= 65535:
        raise InvalidArgument(f"not an endpoint: {text!r:.120}", hint="for example 10.0.0.1:50051")
    return host, port


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def certificate_directory() -> Path:
    chosen = setting("CERT_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return Path(spawn.home_directory()) / "sandbox"


def _trust(stamp: str, loopback: bool, ca_file: str | None) -> tuple[bytes | None, tuple[bytes, bytes] | None]:
    """The CA to check the server by (None: the system's roots), and a client certificate if there is one for it."""
    cert, key = setting("CERT"), setting("KEY")
    if ca_file:
        return _must_read(ca_file), _own_pair(stamp)
    if cert and not key:
        return _must_read(cert), _own_pair(stamp)
    pair = (_must_read(key), _must_read(cert)) if cert and key else _own_pair(stamp)
    return next(_authorities(loopback), None), pair


def _own_pair(stamp: str) -> tuple[bytes, bytes] | None:
    """The certificate Login gave for exactly this endpoint, if it is still valid."""
    directory = certificate_directory()
    try:
        if (directory / "endpoint").read_text().strip() != stamp:
            return None
        key, cert = (directory / "client.key").read_bytes(), (directory / "client.crt").read_bytes()
    except OSError:
        return None
    return (key, cert) if days_left(cert) > 0 else None


def days_left(pem: bytes) -> float:
    """How long a certificate is valid from now, in days; negative when it is not."""
    from cryptography import x509

    try:
        cert = x509.load_pem_x509_certificate(pem)
    except ValueError:
        return -1.0
    return (cert.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def _authorities(loopback: bool) -> Iterator[bytes]:
    """Return the sources of trust for the server, the likeliest first."""
    places = [certificate_directory() / "ca.crt"]
    if loopback:
        places.insert(0, Path(spawn.home_directory()) / "tls" / "sandbox-ca.crt")
        places += [Path(name) for name in _SERVER_CAS]
    for place in places:
        try:
            yield place.read_bytes()
        except OSError:
            continue
    if loopback:
        yield from _cluster_authorities()


def _cluster_authorities() -> Iterator[bytes]:
    names = [*os.environ.get("KUBECONFIG", "").split(":"), str(Path.home() / ".kube" / "config"), *_KUBECONFIGS]
    for name in filter(None, names):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError):
            continue
        found = re.search(r"certificate-authority-data:\s*([A-Za-z0-9+/=]+)", text)
        if found:
            try:
                yield base64.b64decode(found[1], validate=True)
            except ValueError:
                continue


def _must_read(name: str) -> bytes:
    try:
        return Path(name).expanduser().read_bytes()
    except OSError as failure:
        raise Unavailable(f"the certificate {name} cannot be read: {failure.strerror}") from None
