"""Content from a container registry: manifests, indexes and blobs of the OCI distribution protocol.

Nothing it returns is believed before its digest has been checked, bodies have a limit, and interrupted downloads
go on where they stopped. Addresses inside a manifest (`urls`) are ignored (CVE-2020-15157).
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import urllib3

from atoll.errors import DiskFull, ImageError, Unavailable
from atoll.images.layers.limits import Limits
from atoll.images.registry.credentials import DockerConfig
from atoll.images.registry.reference import Reference, is_digest
from atoll.images.registry.transport import ATTEMPTS, Transport, read_limited, reason

MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_CHUNK = 1 << 18
_RESUMES = 100


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A piece of content: what it is, how big, and the digest it must have."""

    media_type: str
    digest: str
    size: int

    @classmethod
    def from_json(cls, value: Any) -> "Descriptor":
        if not isinstance(value, dict):
            raise ImageError("the manifest has a descriptor that is not an object")
        digest, size = value.get("digest"), value.get("size")
        if not isinstance(digest, str) or not is_digest(digest):
            raise ImageError(f"the manifest has a digest that cannot be checked: {str(digest)[:80]!r}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ImageError("the manifest has a size that is not a number")
        return cls(str(value.get("mediaType", "")), digest, size)


@dataclass(frozen=True, slots=True)
class Document:
    """A manifest or index as the registry sent it, its digest checked."""

    media_type: str
    digest: str
    raw: bytes

    def json(self) -> Mapping[str, object]:
        try:
            value = json.loads(self.raw)
        except ValueError as error:
            raise ImageError("the manifest is not valid JSON") from error
        if not isinstance(value, dict):
            raise ImageError("the manifest is not an object")
        return value


class Registry:
    """One repository of one registry. May be used from several threads."""

    def __init__(
        self,
        reference: Reference,
        *,
        credentials: DockerConfig | None = None,
        insecure: Iterable[str] = (),
        ca_file: Path | None = None,
        limits: Limits | None = None,
        public: bool = False,
    ) -> None:
        self._name = reference.registry
        self._repository = reference.repository
        self._limits = limits or Limits()
        self._transport = Transport(
            reference, credentials=credentials, insecure=insecure, ca_file=ca_file, public=public
        )

    def close(self) -> None:
        self._transport.close()

    def manifest(self, version: str) -> Document:
        """The manifest or index of a tag or digest."""
        accept = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
        response = self._transport.get(f"/v2/{self._repository}/manifests/{version}", {"Accept": accept})
        try:
            raw = read_limited(response, self._limits.manifest_bytes, "manifest")
        finally:
            response.release_conn()
        media_type = response.headers.get("Content-Type", "").split(";")[0].strip()
        algorithm = version.partition(":")[0] if is_digest(version) else "sha256"
        digest = f"{algorithm}:{hashlib.new(algorithm, raw).hexdigest()}"
        if is_digest(version) and digest != version:
            raise ImageError(f"the registry sent a manifest with another digest than {version}")
        return Document(media_type, digest, raw)

    def small_blob(self, descriptor: Descriptor, limit: int) -> bytes:
        """A blob that fits in memory, such as an image's configuration."""
        if descriptor.size > limit:
            raise ImageError(f"the image's configuration has {descriptor.size} bytes; {limit} are accepted")
        response = self._transport.get(f"/v2/{self._repository}/blobs/{descriptor.digest}", {})
        try:
            raw = read_limited(response, descriptor.size, "configuration")
        finally:
            response.release_conn()
        algorithm, _, expected = descriptor.digest.partition(":")
        if hashlib.new(algorithm, raw).hexdigest() != expected:
            raise ImageError(f"the registry sent a blob with another digest than {descriptor.digest}")
        return raw

    def download(self, descriptor: Descriptor, target: Path, progress: Callable[[int], None]) -> None:
        """Bring a blob to `target`, going on from what is there already. On return its digest has been checked.

        `progress` hears how many bytes of the blob are there. A cut connection is taken up again; a digest that does
        not match removes the file, because nothing in it can be believed.
        """
        try:
            with _PartialBlob(target, descriptor) as blob:
                progress(blob.size)
                self._fill(blob, descriptor, progress)
                blob.verify()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull("no space left to download the image") from error
            raise ImageError(f"the image cannot be stored: {error.strerror or error}") from error

    def _fill(self, blob: "_PartialBlob", descriptor: Descriptor, progress: Callable[[int], None]) -> None:
        failures = 0
        for _ in range(_RESUMES):
            if blob.size == descriptor.size:
                return
            before = blob.size
            try:
                self._continue(blob, descriptor, progress)
            except urllib3.exceptions.HTTPError as error:
                failures = 1 if blob.size > before else failures + 1
                if failures >= ATTEMPTS:
                    raise Unavailable(
                        f"the download from {self._name} broke off {failures} times: {reason(error)}",
                        hint="pull again: it goes on where it stopped",
                    ) from error
                time.sleep(min(0.1 * 2**failures, 5))
        raise Unavailable(f"the download from {self._name} broke off too often", hint="pull again later")

    def _continue(self, blob: "_PartialBlob", descriptor: Descriptor, progress: Callable[[int], None]) -> None:
        offset = blob.size
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        path = f"/v2/{self._repository}/blobs/{descriptor.digest}"
        response = self._transport.get(path, headers, accept_range=bool(offset))
        try:
            if response.status == 416:
                blob.restart()
                return
            if offset and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                blob.restart()
                if response.status != 200:
                    return
            for chunk in response.stream(_CHUNK, decode_content=False):
                blob.append(chunk)
                progress(blob.size)
            if blob.size < descriptor.size:
                raise urllib3.exceptions.ProtocolError("the body ended early")
        finally:
            if blob.size < descriptor.size:
                response.close()
            response.release_conn()


class _PartialBlob:
    """A blob on its way to disk, hashed as it grows; what an earlier attempt left is taken over."""

    def __init__(self, path: Path, descriptor: Descriptor) -> None:
        self._path = path
        self._descriptor = descriptor
        self._hash = self._new_hash()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "r+b")
        self.size = 0

    def __enter__(self) -> "_PartialBlob":
        if os.fstat(self._file.fileno()).st_size > self._descriptor.size:
            self._file.truncate(0)
        while chunk := self._file.read(_CHUNK):
            self._hash.update(chunk)
            self.size += len(chunk)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def append(self, chunk: bytes) -> None:
        if self.size + len(chunk) > self._descriptor.size:
            self._path.unlink(missing_ok=True)
            raise ImageError(f"the registry sent more than the {self._descriptor.size} bytes it announced")
        self._file.write(chunk)
        self._hash.update(chunk)
        self.size += len(chunk)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash, self.size = self._new_hash(), 0

    def verify(self) -> None:
        if self._hash.hexdigest() != self._descriptor.digest.partition(":")[2]:
            self._path.unlink(missing_ok=True)
            raise ImageError(f"the registry sent a blob with another digest than {self._descriptor.digest}")
        self._file.flush()  # not to disk: whoever takes it over after a crash hashes it again

    def _new_hash(self) -> Any:
        return hashlib.new(self._descriptor.digest.partition(":")[0])
