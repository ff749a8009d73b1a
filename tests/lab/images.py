"""Images made in memory, a real registry with TLS and a login to put them in, and a proxy that cuts connections."""

import gzip
import hashlib
import io
import json
import re
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import bcrypt
import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from atoll.images import DockerConfig

USER, PASSWORD = "alice", "open sesame"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class Member:
    """One tar member, hostile or not."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = 1_700_000_000
    pax: dict[str, str] = field(default_factory=dict)


def make_tar(*members: Member, format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.linkname, info.mode = member.kind, member.link, member.mode
            info.uid, info.gid, info.mtime, info.size = member.uid, member.gid, member.mtime, len(member.data)
            info.pax_headers = member.pax
            archive.addfile(info, io.BytesIO(member.data))
    return out.getvalue()


def directory(name: str, mode: int = 0o755, **more: Any) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, mode=mode, **more)


@dataclass
class BuiltImage:
    """An image as a registry holds it."""

    blobs: dict[str, bytes]
    manifest: bytes
    media_type: str = OCI_MANIFEST

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def layers(self) -> list[str]:
        return [layer["digest"] for layer in json.loads(self.manifest)["layers"]]


def build_image(
    *layers: bytes,
    config: dict[str, Any] | None = None,
    architecture: str = "amd64",
    compress: Callable[[bytes], bytes] = lambda raw: gzip.compress(raw, mtime=0),
    config_type: str = OCI_CONFIG,
) -> BuiltImage:
    compressed = [compress(raw) for raw in layers]
    body = {
        "os": "linux",
        "architecture": architecture,
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(raw) for raw in layers]},
    }
    raw_config = json.dumps(body).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": config_type, "digest": digest_of(raw_config), "size": len(raw_config)},
        "layers": [{"mediaType": OCI_LAYER, "digest": digest_of(item), "size": len(item)} for item in compressed],
    }
    blobs = {digest_of(item): item for item in [*compressed, raw_config]}
    return BuiltImage(blobs, json.dumps(manifest).encode())


class RegistryServer:
    """Debian's docker-registry on loopback, with TLS and a login."""

    def __init__(self, address: str, ca: Path) -> None:
        self.address = address
        self.ca = ca
        headers = urllib3.make_headers(basic_auth=f"{USER}:{PASSWORD}")
        self._http = urllib3.PoolManager(ca_certs=str(ca), headers=headers, retries=urllib3.Retry(3), timeout=60)

    def push(self, repository: str, tag: str, image: BuiltImage) -> str:
        base = f"https://{self.address}/v2/{repository}"
        for digest, data in image.blobs.items():
            begun = self._http.request("POST", f"{base}/blobs/uploads/")
            assert begun.status == 202, begun.data
            location = begun.headers["Location"]
            joint = "&" if "?" in location else "?"
            done = self._http.request("PUT", f"{location}{joint}digest={digest}", body=data)
            assert done.status == 201, done.data
        return self.push_manifest(repository, tag, image.manifest, image.media_type)

    def push_manifest(self, repository: str, tag: str, raw: bytes, media_type: str) -> str:
        headers = {**self._http.headers, "Content-Type": media_type}
        url = f"https://{self.address}/v2/{repository}/manifests/{tag}"
        done = self._http.request("PUT", url, body=raw, headers=headers)
        assert done.status == 201, done.data
        return f"{self.address}/{repository}:{tag}"

    def docker_config(self, directory: Path, password: str = PASSWORD, address: str | None = None) -> DockerConfig:
        """A config.json as `docker login` writes it."""
        encoded = urllib3.make_headers(basic_auth=f"{USER}:{password}")["authorization"].split()[1]
        path = directory / "config.json"
        path.write_text(json.dumps({"auths": {address or self.address: {"auth": encoded}}}))
        return DockerConfig([path])


def _certificate(directory: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "registry under test")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=7))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = directory / "cert.pem", directory / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_path, key_path


@contextmanager
def running_registry(work: Path) -> Iterator[RegistryServer]:
    """Start the registry in `work`, and end it and remove its files afterwards."""
    certificate, key = _certificate(work)
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(rounds=4)).decode()
    (work / "htpasswd").write_text(f"{USER}:{hashed}\n")
    config = {
        "version": "0.1",
        "log": {"level": "info"},
        "storage": {"filesystem": {"rootdirectory": str(work / "data")}, "delete": {"enabled": True}},
        "http": {"addr": "127.0.0.1:0", "tls": {"certificate": str(certificate), "key": str(key)}},
        "auth": {"htpasswd": {"realm": "test", "path": str(work / "htpasswd")}},
    }
    (work / "config.yml").write_text(json.dumps(config))
    log = work / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(work / "config.yml")],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={"PATH": "/usr/bin:/bin", "OTEL_TRACES_EXPORTER": "none"},
        )  # fmt: skip
    try:
        yield RegistryServer(_listening_address(log, process), certificate)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(work, ignore_errors=True)


def _listening_address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text(errors="replace"))
        if found:
            return found.group(1)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"docker-registry did not start:\n{log.read_text(errors='replace')}")


class CuttingProxy:
    """Passes TCP on to the registry and cuts each connection after so many bytes, as long as cuts are left."""

    def __init__(self, target: str, after: int, cuts: int) -> None:
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._after = after
        self.cuts_left = cuts
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=30)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for source, sink, counted in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, counted), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        passed = 0
        try:
            while data := source.recv(16384):
                sink.sendall(data)
                passed += len(data)
                if counted and passed > self._after and self._take_cut():
                    break
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()

    def _take_cut(self) -> bool:
        with self._lock:
            if self.cuts_left <= 0:
                return False
            self.cuts_left -= 1
            return True
