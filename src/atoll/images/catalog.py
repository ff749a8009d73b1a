"""The catalog: short names for images, what they stand for, and which the operator allows.

The data is in `catalog.toml`. A name is looked up as a local build first, then here, then as a reference.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from atoll.errors import ImageNotAllowed, InvalidArgument
from atoll.images.registry.reference import Reference

HOST = "host"
RUNTIMES = ("python", "node", "go", "rust", "ruby", "java", "c", "dotnet")  # agentkernel.toml's `runtime` words
BASE = "base"


@dataclass(frozen=True, slots=True)
class CatalogImage:
    """One entry: the reference to pull, the packages that stand in for it, and what selects it."""

    name: str
    oci: str
    debian: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    oci_lacks: tuple[str, ...] = ()  # of `commands`, what the stock image does not have
    debian_lacks: tuple[str, ...] = ()  # and what the package set does not have
    kind: str = "builtin"  # or "custom"

    def oci_has(self, program: str) -> bool:
        """Return whether the stock image has this program, as far as the catalog knows."""
        return program.rpartition("/")[2] not in self.oci_lacks

    def debian_has(self, program: str) -> bool:
        """Return whether there is a package set, and it has this program as far as the catalog knows."""
        return bool(self.debian) and program.rpartition("/")[2] not in self.debian_lacks


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset of the function API: what clients are shown, and the catalog entry that runs."""

    name: str
    oci: str
    image: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """All entries in detection order, with the operator's own names added at the end."""

    images: tuple[CatalogImage, ...]
    presets: tuple[Preset, ...]
    default: str

    @classmethod
    def load(cls, custom: Mapping[str, str] | None = None) -> "Catalog":
        """The built-in catalog and `custom` names, each standing for a reference."""
        builtin = _builtin()
        if not custom:
            return builtin
        extra = []
        for name, oci in sorted(custom.items()):
            if not name or builtin.get(name) is not None or name == HOST or "/" in name or ":" in name:
                raise InvalidArgument(f"not a name for a custom image: {name!r}")
            extra.append(CatalogImage(name, str(Reference.parse(oci)), kind="custom"))
        return cls((*builtin.images, *extra), builtin.presets, builtin.default)

    def get(self, name: str) -> CatalogImage | None:
        return next((image for image in self.images if image.name == name), None)

    def by_reference(self, name: str) -> CatalogImage | None:
        """The entry a spelled-out reference stands for, if it is exactly the one the catalog has."""
        canonical = canonical_name(self, name)
        return next((image for image in self.images if image.oci == canonical), None)

    def names(self) -> tuple[str, ...]:
        return tuple(image.name for image in self.images)

    def for_runtime(self, word: str) -> CatalogImage:
        """The `runtime` shorthand of a project file."""
        image = self.get(word) if word in (*RUNTIMES, BASE) else None
        if image is None:
            raise InvalidArgument(f"unknown runtime {word!r}", hint=f"one of {', '.join((*RUNTIMES, BASE))}")
        return image


@cache
def _builtin() -> Catalog:
    data = _data()
    images = tuple(
        CatalogImage(
            name=entry["name"],
            oci=entry["oci"],
            debian=tuple(entry.get("debian", ())),
            commands=tuple(entry.get("commands", ())),
            files=tuple(entry.get("files", ())),
            oci_lacks=tuple(entry.get("oci_lacks", ())),
            debian_lacks=tuple(entry.get("debian_lacks", ())),
        )
        for entry in data["image"]
    )
    presets = tuple(Preset(name, entry["oci"], entry["image"]) for name, entry in data["preset"].items())
    return Catalog(images, presets, data["default"])


@cache
def _data() -> dict[str, Any]:
    text = resources.files("atoll.images").joinpath("catalog.toml").read_text()
    return tomllib.loads(text)


def default_debian_sources() -> tuple[str, ...]:
    """Package sources for a machine that has none of its own."""
    return tuple(_data()["debian"]["sources"])


def canonical_name(catalog: Catalog, name: str) -> str:
    """One spelling for each image: `host`, a local name as it is, else the full reference it stands for."""
    if name == HOST:
        return HOST
    entry = catalog.get(name)
    return entry.oci if entry is not None else str(Reference.parse(name))


@dataclass(frozen=True, slots=True)
class Allowlist:
    """The allowlist of images. Without a list all may be used; with one, only what it names; an empty one names nothing."""

    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, names: Iterable[str] | None) -> "Allowlist":
        return cls(None if names is None else tuple(names))

    def allows(self, name: str, catalog: Catalog) -> bool:
        if self.names is None:
            return True
        if name in self.names:
            return True
        wanted = canonical_name(catalog, name)
        return any(wanted == canonical_name(catalog, allowed) for allowed in self.names)

    def check(self, name: str, catalog: Catalog) -> None:
        """Refuse what is not listed, and say what is."""
        if not self.allows(name, catalog):
            listed = list(self.names or ())
            raise ImageNotAllowed(
                f"the image {name!r} is not allowed here",
                hint=f"allowed: {', '.join(listed)}" if listed else "no image is allowed",
                details={"allowed": listed},
            )
