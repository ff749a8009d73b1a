"""The image store's records: one small file per image, and one per name that points at an image.

An image record is written after all its layers are on disk, a name after its image: a half image never counts.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from atoll.images.image import Settings, Source
from atoll.images.layers.tree import write_atomically


class RecordFields(TypedDict):
    """The file of an image."""

    digest: str
    source: Source
    layers: list[str]
    env: dict[str, str]
    user: str
    workdir: str
    entrypoint: list[str]
    cmd: list[str]
    size: int
    created: str
    platform: str
    index_digest: NotRequired[str]
    notes: NotRequired[list[str]]
    host: NotRequired[str]
    author: NotRequired[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """An image as stored: its layers bottom first, and its author's settings."""

    digest: str
    source: Source
    layers: tuple[str, ...]
    settings: Settings
    size: int
    created: str
    platform: str
    index_digest: str = ""
    notes: tuple[str, ...] = ()
    host: str = ""  # the digest of the machine's own image, for one that was built on that
    author: dict[str, Any] = field(default_factory=dict)  # what sandboxes do not read: labels, ports, volumes

    def to_json(self) -> RecordFields:
        settings = self.settings
        return {
            "digest": self.digest,
            "source": self.source,
            "layers": list(self.layers),
            "env": dict(settings.env),
            "user": settings.user,
            "workdir": settings.workdir,
            "entrypoint": list(settings.entrypoint),
            "cmd": list(settings.cmd),
            "size": self.size,
            "created": self.created,
            "platform": self.platform,
            "index_digest": self.index_digest,
            "notes": list(self.notes),
            "host": self.host,
            "author": self.author,
        }

    @classmethod
    def from_json(cls, value: RecordFields) -> "ImageRecord":
        settings = Settings(
            env=dict(value["env"]),
            user=value["user"],
            workdir=value["workdir"],
            entrypoint=tuple(value["entrypoint"]),
            cmd=tuple(value["cmd"]),
        )
        return cls(
            digest=value["digest"],
            source=value["source"],
            layers=tuple(value["layers"]),
            settings=settings,
            size=value["size"],
            created=value["created"],
            platform=value["platform"],
            index_digest=value.get("index_digest", ""),
            notes=tuple(value.get("notes", ())),
            host=value.get("host", ""),
            author=dict(value.get("author", {})),
        )


class Records:
    """The files `images/<hex>.json` and `names/<hash of the name>.json`."""

    def __init__(self, images: Path, names: Path) -> None:
        self._images = images
        self._names = names

    def save(self, record: ImageRecord, *names: str) -> None:
        path = self._images / f"{record.digest.partition(':')[2]}.json"
        write_atomically(path, json.dumps(record.to_json()).encode())
        for name in names:
            self.point(name, record.digest)

    def point(self, name: str, digest: str) -> None:
        write_atomically(self._name_path(name), json.dumps({"name": name, "digest": digest}).encode())

    def by_name(self, name: str) -> ImageRecord | None:
        described = _load(self._name_path(name))
        return self.by_digest(described["digest"]) if described and described.get("name") == name else None

    def by_digest(self, digest: str) -> ImageRecord | None:
        value = _load(self._images / f"{digest.partition(':')[2]}.json")
        return ImageRecord.from_json(value) if value else None

    def names(self) -> dict[str, str]:
        """Every name and the digest it points at, sorted by name."""
        found = (_load(Path(entry.path)) for entry in os.scandir(self._names) if entry.name.endswith(".json"))
        return {item["name"]: item["digest"] for item in sorted((i for i in found if i), key=lambda i: str(i["name"]))}

    def images(self) -> Iterator[ImageRecord]:
        for entry in os.scandir(self._images):
            value = _load(Path(entry.path)) if entry.name.endswith(".json") else None
            if value:
                yield ImageRecord.from_json(value)

    def forget_name(self, name: str) -> None:
        self._name_path(name).unlink(missing_ok=True)

    def forget_image(self, digest: str) -> None:
        (self._images / f"{digest.partition(':')[2]}.json").unlink(missing_ok=True)

    def _name_path(self, name: str) -> Path:
        return self._names / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"


def _load(path: Path) -> Any:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
