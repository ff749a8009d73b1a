"""Images: what a sandbox's root file system is made of.

`ImageStore` pulls OCI images, builds Debian package sets and prepares the machine's own `host` image; `Catalog` and
`detect` say which of them a command means; `obtain` puts the two together. Everything here blocks and knows nothing
of sandboxes.
"""

from atoll.images.catalog import Allowlist, Catalog, CatalogImage
from atoll.images.detect import Detection, detect
from atoll.images.image import Image
from atoll.images.layers.limits import Limits
from atoll.images.progress import Progress, ProgressCallback, TerminalBar
from atoll.images.registry.credentials import DockerConfig
from atoll.images.registry.reference import Reference
from atoll.images.selection import Choice, obtain
from atoll.images.sources.host import HostImage
from atoll.images.store import ImageStore, Pruned

__all__ = [
    "Allowlist",
    "Catalog",
    "CatalogImage",
    "Choice",
    "Detection",
    "DockerConfig",
    "HostImage",
    "Image",
    "ImageStore",
    "Limits",
    "Progress",
    "ProgressCallback",
    "Pruned",
    "Reference",
    "TerminalBar",
    "detect",
    "obtain",
]
