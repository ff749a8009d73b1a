"""What the machine adds to every image: readable by all, made once, following what the machine trusts."""

import os
from pathlib import Path

import pytest

from atoll.errors import ImageError
from atoll.images.registry import authorities
from atoll.images.sources import site

CERTIFICATE = "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    root = tmp_path / "machine"
    (root / "etc/ssl/certs").mkdir(parents=True)
    (root / "etc/ssl/certs/ca-certificates.crt").write_text(CERTIFICATE.format("usual"))
    return root


def test_a_layer_is_made_once(machine: Path, tmp_path: Path) -> None:
    """Give the same directory for the same content and another for other content, whatever the umask is."""
    before = os.umask(0o077)
    try:
        first = site.layer(tmp_path / "site", None, machine)
    finally:
        os.umask(before)
    assert site.layer(tmp_path / "site", None, machine) == first
    for place in ("etc/ssl/certs/ca-certificates.crt", "etc/ssl/cert.pem", "etc/pki/tls/certs/ca-bundle.crt"):
        assert "usual" in (first / place).read_text()
        assert (first / place).stat().st_mode & 0o777 == 0o644
    for path, _, _ in os.walk(first):
        assert os.stat(path).st_mode & 0o777 == 0o755, path
    assert (first / "etc/resolv.conf").read_text().startswith("nameserver 100.96.")
    assert "localhost" in (first / "etc/hosts").read_text()
    extra = tmp_path / "ca.pem"
    extra.write_text(CERTIFICATE.format("company"))
    second = site.layer(tmp_path / "site", extra, machine)
    assert second != first
    bundle = (second / "etc/ssl/certs/ca-certificates.crt").read_text()
    assert "usual" in bundle and "company" in bundle
    assert (second / authorities.ADDED).read_text() == CERTIFICATE.format("company")
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == sorted([first.name, second.name])


def test_node_and_pip_are_told_only_of_more(machine: Path, tmp_path: Path) -> None:
    """Set their variables only where something was added to the usual authorities."""
    assert dict(authorities.environment(None, machine)) == {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt"}
    (machine / "usr/local/share/ca-certificates").mkdir(parents=True)
    (machine / "usr/local/share/ca-certificates/company.crt").write_text(CERTIFICATE.format("company"))
    told = authorities.environment(None, machine)
    assert told["NODE_EXTRA_CA_CERTS"] == f"/{authorities.ADDED}" and "REQUESTS_CA_BUNDLE" in told
    assert authorities.added(None, machine) == CERTIFICATE.format("company")
    assert authorities.environment(None, tmp_path / "bare") == {}


def test_a_file_without_certificates_is_refused(machine: Path, tmp_path: Path) -> None:
    """Name the operator's file that is missing or holds no certificate."""
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    for path in (empty, tmp_path / "missing.pem"):
        with pytest.raises(ImageError, match=path.name):
            authorities.bundle(path, machine)
