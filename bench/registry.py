"""Debian's docker-registry on loopback with TLS, and an image in it whose layers do not compress."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bench.programs import SEARCH, find, run

CA, KEY = "registry-ca.pem", "registry-key.pem"
LAYERS = 4
LAYER_BYTES = 32 << 20
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
STARTED = re.compile(r"listening on (127\.0\.0\.1:\d+)")


@dataclass(frozen=True)
class Registry:
    """Where it listens, and the layers of its image `bench:1`."""

    address: str
    blobs: list[str]


def serve(work: Path, clean: ExitStack) -> Registry:
    """Start it below `work`, where its certificate is; `clean` ends it."""
    place, ca, program = work / "registry", work / CA, find("docker-registry")
    place.mkdir()
    config = {
        "version": "0.1",
        "log": {"level": "info"},
        "storage": {"filesystem": {"rootdirectory": str(place / "data")}},
        "http": {"addr": "127.0.0.1:0", "tls": {"certificate": str(ca), "key": str(work / KEY)}},
    }
    (place / "config.yml").write_text(json.dumps(config))
    log = place / "log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [program, "serve", str(place / "config.yml")],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={"PATH": SEARCH, "OTEL_TRACES_EXPORTER": "none"},
        )  # fmt: skip
    clean.callback(server.wait, 30)
    clean.callback(server.terminate)
    until = time.monotonic() + 60
    while not (found := STARTED.search(log.read_text(errors="replace"))):
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError("docker-registry did not start: " + log.read_text(errors="replace")[-300:])
        time.sleep(0.05)
    return Registry(found[1], _push(found[1], ca))


def _push(address: str, ca: Path) -> list[str]:
    """An image of layers that do not compress, so that the bytes on the wire are the bytes on disk."""
    layers = [_layer(number) for number in range(LAYERS)]
    packed = [gzip.compress(layer, 1) for layer in layers]
    rootfs = {"type": "layers", "diff_ids": [_digest(layer) for layer in layers]}
    config = json.dumps({"os": "linux", "architecture": "amd64", "config": {}, "rootfs": rootfs}).encode()
    described = [
        {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": _digest(p), "size": len(p)}
        for p in packed
    ]
    own = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": _digest(config), "size": len(config)}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": own, "layers": described}
    curl = [find("curl"), "--silent", "--show-error", "--fail", "--cacert", str(ca)]
    base = f"https://{address}/v2/bench"
    for blob in (*packed, config):
        begun = run([*curl, "-X", "POST", "-o", "/dev/null", "-w", "%header{location}", f"{base}/blobs/uploads/"])
        place = begun.stdout.decode().strip()
        joint = "&" if "?" in place else "?"
        _put(curl, f"{place}{joint}digest={_digest(blob)}", "application/octet-stream", blob)
    _put(curl, f"{base}/manifests/1", MANIFEST, json.dumps(manifest).encode())
    return [_digest(p) for p in packed]


def _put(curl: list[str], url: str, kind: str, data: bytes) -> None:
    argv = [*curl, "-X", "PUT", "-H", f"Content-Type: {kind}", "--data-binary", "@-", "-o", "/dev/null", url]
    run(argv, input=data)


def _layer(number: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        entry = tarfile.TarInfo(f"data-{number}")
        entry.size = LAYER_BYTES
        tar.addfile(entry, io.BytesIO(os.urandom(LAYER_BYTES)))
    return made.getvalue()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def make_certificate(directory: Path) -> None:
    """A certificate for loopback, made before the daemon starts because its settings name it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench registry")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
    made = made.not_valid_after(now + timedelta(days=2)).add_extension(names, critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    plain = serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (directory / CA).write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    (directory / KEY).write_bytes(key.private_bytes(pem, form, plain))
