"""The certificate authorities this machine trusts, the added ones among them, and how programs learn of them.

Most programs read the system's list. Node and pip bring one of their own, so they are pointed to what was added here.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from atoll.errors import ImageError

BUNDLES = (
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
)
BUNDLE = "etc/ssl/certs/ca-certificates.crt"  # where it is in every sandbox
ADDED = (
    "etc/ssl/certs/atoll-added-ca.pem"  # what is trusted beyond the usual: small, because Node reads it at every start
)
_ADDED_HERE = ("usr/local/share/ca-certificates", "etc/pki/ca-trust/source/anchors", "etc/pki/trust/anchors")
_BEGIN = "-----BEGIN CERTIFICATE-----"
_MAX_BUNDLE = 8 << 20
_MAX_ADDED = 256


def bundle(extra_ca: Path | None, root: Path = Path("/")) -> str:
    """All authorities this machine trusts with the operator's own, in PEM form; empty when it has no list."""
    found = ""
    for place in BUNDLES:
        try:
            with open(root / place, encoding="utf-8", errors="replace") as file:
                found = file.read(_MAX_BUNDLE)
            break
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
    return found if extra_ca is None else f"{found.rstrip()}\n{read_certificates(extra_ca)}".lstrip()


def added(extra_ca: Path | None, root: Path = Path("/")) -> str:
    """Those the administrator or the operator added, in PEM form."""
    found = [] if extra_ca is None else [read_certificates(extra_ca)]
    for path in _added_files(root):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if _BEGIN in text:
            found.append(text)
    return "\n".join(text.rstrip() for text in found[:_MAX_ADDED]) + "\n" if found else ""


def environment(extra_ca: Path | None, root: Path = Path("/")) -> Mapping[str, str]:
    """Variables for programs that would not look at the system's list."""
    if extra_ca is None and not any((root / place).is_file() for place in BUNDLES):
        return {}
    plain = {"SSL_CERT_FILE": f"/{BUNDLE}"}
    if extra_ca is None and next(_added_files(root), None) is None:
        return plain
    return {**plain, "REQUESTS_CA_BUNDLE": f"/{BUNDLE}", "NODE_EXTRA_CA_CERTS": f"/{ADDED}"}


def _added_files(root: Path) -> Iterator[Path]:
    for place in _ADDED_HERE:
        try:
            names = sorted(os.listdir(root / place))
        except OSError:
            continue
        yield from (root / place / name for name in names if name.endswith((".crt", ".pem")))


def read_certificates(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"cannot read the CA file {path}: {error}") from error
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise ImageError(f"{path} holds no certificate in PEM form")
    return text
