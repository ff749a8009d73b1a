"""Choose the platform of an image that runs on this machine."""

import platform as machine
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import ImageError, InvalidArgument
from atoll.images.registry.client import Descriptor

_ARCHITECTURES = {
    "x86_64": ("amd64", ""),
    "amd64": ("amd64", ""),
    "aarch64": ("arm64", "v8"),
    "arm64": ("arm64", "v8"),
    "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"),
    "i686": ("386", ""),
    "ppc64le": ("ppc64le", ""),
    "s390x": ("s390x", ""),
    "riscv64": ("riscv64", ""),
}


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system and a processor, in the words registries use."""

    os: str
    architecture: str
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> "Platform":
        parts = text.split("/")
        if len(parts) not in (2, 3) or not all(part.isalnum() for part in parts):
            raise InvalidArgument(f"not a platform: {text!r}", hint="for example linux/amd64 or linux/arm64/v8")
        return cls(*parts)

    @classmethod
    def here(cls) -> "Platform":
        name = machine.machine().lower()
        architecture, variant = _ARCHITECTURES.get(name, (name, ""))
        return cls("linux", architecture, variant)

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)

    def matches(self, offered: Mapping[str, object]) -> bool:
        """Same system and processor, and the same variant where both name one."""
        if offered.get("os") != self.os or offered.get("architecture") != self.architecture:
            return False
        variant = offered.get("variant") or ""
        return not (variant and self.variant) or variant == self.variant


def choose(index: Mapping[str, object], wanted: Platform) -> Descriptor:
    """The manifest of an index for one platform; the error names what there is."""
    manifests = index.get("manifests")
    if not isinstance(manifests, list):
        raise ImageError("the image's index lists no manifests")
    offered: list[str] = []
    for entry in manifests:
        platform = entry.get("platform") if isinstance(entry, dict) else None
        if not isinstance(platform, dict):
            continue
        if wanted.matches(platform):
            return Descriptor.from_json(entry)
        name = f"{platform.get('os')}/{platform.get('architecture')}"
        if name.isprintable() and name != "unknown/unknown" and name not in offered:
            offered.append(name[:40])
    names = ", ".join(offered[:20]) or "nothing"
    raise ImageError(f"the image is not made for {wanted}", hint=f"it is made for {names}")
