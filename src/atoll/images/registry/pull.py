"""Pulls one image: manifest, platform, configuration, then each layer that is not on disk yet.

Layers are brought side by side, each unpacked as soon as it is there. Compressed layers are thrown away once their
content is unpacked; a broken-off download stays and is taken up by the next pull.
"""

import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from atoll.errors import DiskFull, ImageError, Unsupported
from atoll.images.image import OciConfig, parse_config
from atoll.images.layers.layers import Layer, LayerStore
from atoll.images.layers.limits import Limits
from atoll.images.locks import file_lock
from atoll.images.progress import Progress, ProgressCallback, Stage
from atoll.images.records import ImageRecord
from atoll.images.registry.client import INDEX_TYPES, MANIFEST_TYPES, Descriptor, Document, Registry
from atoll.images.registry.platforms import Platform, choose
from atoll.images.registry.reference import Reference

_DOWNLOADS = 3  # at once
_UNPACKING = 2  # at once: an archive may ask for 128 MiB of memory
_TOLD_EVERY = 0.05
_INDEX_DEPTH = 3
_NOT_LAYERS = ("application/vnd.in-toto", "application/vnd.dev.cosign", "application/vnd.cncf.helm")


def pull(
    reference: Reference,
    platform: Platform,
    registry: Registry,
    layers: LayerStore,
    blobs: Path,
    limits: Limits,
    progress: ProgressCallback,
) -> ImageRecord:
    """Bring an image completely to disk and describe it; the caller writes the record."""
    progress(Progress("resolve", str(reference)))
    top = registry.manifest(reference.version)
    document = _manifest_for(top, registry, platform)
    manifest = document.json()
    config_descriptor = Descriptor.from_json(manifest.get("config"))
    descriptors = _layer_descriptors(manifest, limits)
    config = parse_config(registry.small_blob(config_descriptor, limits.config_bytes))
    _check_platform(config, platform)
    if len(config.diff_ids) != len(descriptors):
        raise ImageError("the image's configuration and manifest do not list the same layers")
    wanted = dict(zip(config.diff_ids, descriptors, strict=True))
    unpacked = _Fetch(registry, layers, blobs, progress, limits.total_bytes).fetch(wanted)
    return ImageRecord(
        digest=document.digest,
        source="oci",
        layers=config.diff_ids,
        settings=config.settings,
        size=sum(layer.size for layer in unpacked.values()),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        platform=str(platform),
        index_digest=top.digest if top.digest != document.digest else "",
        notes=_notes(unpacked),
    )


def _manifest_for(document: Document, registry: Registry, platform: Platform) -> Document:
    for _ in range(_INDEX_DEPTH):
        value = document.json()
        kind = value.get("mediaType") or document.media_type
        if kind in INDEX_TYPES or ("manifests" in value and "layers" not in value):
            document = registry.manifest(choose(value, platform).digest)
            continue
        if kind in MANIFEST_TYPES or (value.get("schemaVersion") == 2 and "layers" in value):
            return document
        raise Unsupported(
            "the registry offers this image only in a format that is no longer in use",
            hint="push it again with a current builder",
        )
    raise ImageError("the image's index is nested too deeply")


def _layer_descriptors(manifest: Mapping[str, object], limits: Limits) -> list[Descriptor]:
    listed = manifest.get("layers")
    if not isinstance(listed, list) or not listed:
        raise ImageError("the image has no layers")
    if len(listed) > limits.layers:
        raise ImageError(f"the image has {len(listed)} layers; {limits.layers} are accepted")
    descriptors = [Descriptor.from_json(item) for item in listed]
    if sum(item.size for item in descriptors) > limits.download_bytes:
        raise ImageError(f"the image is bigger than the {limits.download_bytes} bytes that are accepted")
    for item in descriptors:
        if item.media_type.startswith(_NOT_LAYERS) or item.media_type.endswith("+encrypted"):
            raise ImageError(f"the image has a layer that is not a file system: {item.media_type[:80]!r}")
    return descriptors


def _check_platform(config: OciConfig, platform: Platform) -> None:
    offered = {"os": config.os, "architecture": config.architecture}
    if not platform.matches(offered):
        raise ImageError(f"the image is made for {config.os[:20]}/{config.architecture[:20]}, not for {platform}")


def _notes(layers: dict[str, Layer]) -> tuple[str, ...]:
    totals: dict[str, int] = {}
    for layer in layers.values():
        for text, count in layer.notes.items():
            totals[text] = totals.get(text, 0) + count
    return tuple(f"{text} ({count})" for text, count in sorted(totals.items()))


class _Fetch:
    """The layers of one pull, and how far they are."""

    def __init__(
        self, registry: Registry, layers: LayerStore, blobs: Path, progress: ProgressCallback, most: int
    ) -> None:
        self._registry = registry
        self._layers = layers
        self._blobs = blobs
        self._progress = progress
        self._lock = threading.Lock()
        self._downloading = threading.Semaphore(_DOWNLOADS)
        self._unpacking = threading.Semaphore(_UNPACKING)
        self._done: dict[tuple[Stage, str], int] = {}
        self._told: dict[Stage, float] = {}
        self._total = 0
        self._most = most  # bytes on disk of all new layers together
        self._cancelled = threading.Event()

    def fetch(self, wanted: dict[str, Descriptor]) -> dict[str, Layer]:
        """Every layer by the digest of its content, downloading only what is missing."""
        found = {diff_id: layer for diff_id in wanted if (layer := self._layers.get(diff_id)) is not None}
        missing = {diff_id: item for diff_id, item in wanted.items() if diff_id not in found}
        self._total = sum(item.size for item in missing.values())
        if min(shutil.disk_usage(self._blobs).free, self._most) < self._total:
            raise DiskFull(
                f"the image needs {self._total} bytes and more, which are not free", hint="`atoll image prune`"
            )
        if missing:
            _ = self._layers.flavour  # found out once, before several want to know
        with ThreadPoolExecutor(_DOWNLOADS + _UNPACKING, thread_name_prefix="pull") as pool:
            brought = {diff_id: pool.submit(self._bring, diff_id, item) for diff_id, item in missing.items()}
            try:
                for diff_id, layer_to_be in brought.items():
                    found[diff_id] = layer_to_be.result()
                    if sum(found[one].size for one in missing if one in found) > self._most:
                        raise ImageError(f"the image takes more than the {self._most} bytes that are accepted")
            except BaseException:
                self._cancelled.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        for item in missing.values():
            self._blob_path(item).unlink(missing_ok=True)  # the lock file stays: others may be waiting for it
        return found

    def _bring(self, diff_id: str, item: Descriptor) -> Layer:
        """Download a layer and unpack it. Its blob goes before the tree is synced, so as not to be written to disk for nothing."""
        blob = self._blob_path(item)
        with file_lock(self._lock_path(item)):
            layer = self._layers.get(diff_id)
            if layer is not None:  # another process has brought it while we waited
                return layer
            with self._downloading:
                self._registry.download(item, blob, lambda done: self._tell("download", item, done))
            with self._unpacking, open(blob, "rb", opener=_no_follow) as source:
                return self._layers.add(
                    source, diff_id, lambda done: self._tell("unpack", item, done), lambda _tree: blob.unlink()
                )

    def _tell(self, stage: Stage, item: Descriptor, done: int) -> None:
        """Say how far it is, now and then. The callback need not expect several threads at once."""
        if self._cancelled.is_set():
            raise ImageError("the pull was given up")
        with self._lock:
            before = self._done.get((stage, item.digest))
            self._done[stage, item.digest] = done
            now = time.monotonic()
            if before is None or done == item.size or now - self._told[stage] >= _TOLD_EVERY:
                self._told[stage] = now
                total = sum(count for (of, _), count in self._done.items() if of == stage)
                self._progress(Progress(stage, item.digest[:19], total, self._total))

    def _blob_path(self, item: Descriptor) -> Path:
        return self._blobs / item.digest.replace(":", "-")

    def _lock_path(self, item: Descriptor) -> Path:
        return self._blobs / f"{item.digest.replace(':', '-')}.lock"


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
