"""The gateway's key: whoever holds its private half is a gateway to every pod whose template names the public half."""

import base64
import datetime
import os
import ssl
from functools import cache
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from atoll.errors import InvalidArgument

_SALT = b"atoll kubernetes hello v1"
_SECRET_BYTES = 16
_FIRST = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_LAST = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


class GatewayKey:
    """An Ed25519 key, and what is derived from it. The same key gives the same secrets in every gateway."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.raw = private.private_bytes_raw()
        self.public_raw = private.public_key().public_bytes_raw()
        self.public = base64.b64encode(self.public_raw).decode()  # for `--gateway-key` in a template
        self._context = cache(self._make_context)

    @staticmethod
    def generate() -> "GatewayKey":
        return GatewayKey(Ed25519PrivateKey.generate())

    @staticmethod
    def load(path: str | Path) -> "GatewayKey":
        """Read a private key in PEM form (PKCS #8), as `openssl genpkey -algorithm ed25519` writes it."""
        try:
            private = serialization.load_pem_private_key(Path(path).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgument(
                f"the gateway's key {path} cannot be read: {error}", hint="openssl genpkey -algorithm ed25519"
            ) from None
        if not isinstance(private, Ed25519PrivateKey):
            raise InvalidArgument(f"the gateway's key {path} is no Ed25519 key")
        return GatewayKey(private)

    def to_pem(self) -> bytes:
        """Return the private key as `load` reads it."""
        return self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def hello_secret(self, claim: str, pod: str, side: Literal["host", "agent"]) -> str:
        """Return one of the two secrets of the hello, for this claim in this pod."""
        info = b"\0".join((claim.encode(), pod.encode(), side.encode()))
        return HKDF(hashes.SHA256(), _SECRET_BYTES, _SALT, info).derive(self.raw).hex()

    def context(self, purpose: str) -> ssl.SSLContext:
        """Return the settings of TLS towards an agent, for one ALPN name. The peer is checked by `dial`, by its fingerprint."""
        return self._context(purpose)

    def _make_context(self, purpose: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([purpose])
        file = os.memfd_create("gateway-key")  # OpenSSL takes it from a file, and this one is nowhere
        try:
            os.write(file, self._certificate() + self.to_pem())
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return context

    def _certificate(self) -> bytes:
        """Return a certificate that says nothing but the key."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll-gateway")])
        builder = x509.CertificateBuilder(name, name, self._private.public_key(), 1, _FIRST, _LAST)
        return builder.sign(self._private, None).public_bytes(serialization.Encoding.PEM)
