"""How much an image may ask of this machine before it is refused."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on one image. The defaults let every ordinary image through and stop every bomb."""

    manifest_bytes: int = 4 << 20
    config_bytes: int = 8 << 20
    layers: int = 127
    download_bytes: int = 32 << 30  # compressed, all layers together
    unpacked_bytes: int = 64 << 30  # of one layer
    total_bytes: int = 1 << 50  # of all new layers of one image together, unpacked
    entries: int = 500_000  # of one layer
    depth: int = 96  # path components
    path_bytes: int = 4096
    ratio: int = 300  # unpacked to compressed, once a layer has unpacked more than `ratio_from`
    ratio_from: int = 256 << 20
