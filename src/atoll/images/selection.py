"""From a detection to an image that is really here, by the one order every surface uses.

Detected: `host` if this machine has the program; else the catalog's image, from its registry or of Debian packages,
whichever has the program. The operator may put the catalog first (`images.prefer = "catalog"`). Which images earlier runs
have fetched plays no part: the same command in the same project means the same image before and after any other run.
Named: exactly that image, pulled or built, or an error. A named reference is never replaced by something similar; a name
of the catalog may be, and the result says so.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.errors import AtollError, ImageError, NotFound, PermissionDenied, Unavailable, Unsupported
from atoll.images.catalog import HOST, Allowlist, Catalog, CatalogImage
from atoll.images.detect import DEFAULT, Detection, host_program
from atoll.images.image import Image
from atoll.images.interpreter.image import NAME as INTERPRETER
from atoll.images.progress import Progress, ProgressCallback, silent
from atoll.images.registry.public import Guest
from atoll.images.sources.host import HostImage
from atoll.images.store import ImageStore
from atoll.profiles import nearest

ANY_IMAGE = Allowlist()
CATALOG = "catalog"  # as the operator's `prefer`
_TRY_NEXT = (Unavailable, NotFound, PermissionDenied, ImageError)


@dataclass(frozen=True, slots=True)
class Choice:
    """The image to use, and one sentence on how it was chosen."""

    image: Image | HostImage
    why: str


def obtain(
    detection: Detection,
    store: ImageStore,
    catalog: Catalog,
    *,
    allowlist: Allowlist = ANY_IMAGE,
    progress: ProgressCallback = silent,
    may_fetch: bool = True,
    guest: Guest | None = None,
    host: Callable[[], HostImage] | None = None,
    prefer: str = HOST,
) -> Choice:
    """Bring the image here if it is not. `may_fetch=False` uses only local ones; `host` may give one already prepared."""
    name = detection.image_name
    make_host = host or store.host_image
    if detection.explicit:
        allowlist.check(name, catalog)
        if name == HOST:
            return Choice(make_host(), detection.why)
        if name == INTERPRETER:
            image = store.interpreter_image(progress, may_fetch=may_fetch)
            if image is None:
                raise NotFound(f"the image {name!r} is not built yet", hint=f"`atoll image build {name}`")
            return Choice(image, detection.why)
        if guest is not None and allowlist.names is not None:
            guest = replace(guest, anywhere=True)  # the operator listed it
        return _named(name, store, catalog, detection, progress, may_fetch, guest)
    entry = catalog.get(name)
    if entry is None:
        raise NotFound(f"the catalog has no image {name!r}", hint=f"it has {', '.join(catalog.names())}")
    program = detection.program or next((word for word in entry.commands if host_program(word) is not None), "")
    has_it = entry.oci_has(detection.program) or entry.debian_has(detection.program)
    if allowlist.allows(HOST, catalog) and not (prefer == CATALOG and has_it and allowlist.allows(name, catalog)):
        if host_program(program) is not None:
            return Choice(make_host(), f"{detection.why}; this machine has `{program}`")
        if not has_it or (detection.why == DEFAULT and detection.program):
            # No image is fetched for a program that none is known to have: that it is missing shows at once.
            return Choice(
                make_host(), f"{detection.why}; no image here is known to have `{program or detection.program}`"
            )
    allowlist.check(name, catalog)
    local = _local(entry, store, detection.program)
    if local is not None:
        return Choice(local, f"{detection.why}; a copy is here")
    return _fetched(entry, store, detection, progress, may_fetch, guest)


def _named(
    name: str,
    store: ImageStore,
    catalog: Catalog,
    detection: Detection,
    progress: ProgressCallback,
    may_fetch: bool,
    guest: Guest | None,
) -> Choice:
    entry = catalog.get(name)
    local = store.find(name) if entry is None else _local(entry, store, "")
    if local is not None:
        return Choice(local, detection.why)
    if entry is not None:
        return _fetched(entry, store, detection, progress, may_fetch, guest)
    if not may_fetch:
        raise NotFound(f"the image {name!r} is not on this machine", hint=f"get it with `atoll image pull {name}`")
    try:
        return Choice(store.pull(name, progress=progress, guest=guest), detection.why)
    except _TRY_NEXT as error:
        stand_in = catalog.by_reference(name)
        if stand_in is not None and stand_in.debian and not error.hint:
            error.hint = f"the catalog name `{stand_in.name}` can be built from Debian packages"
        if "/" not in name and not error.hint:
            without_registry = [HOST, *(image.name for image in catalog.images if image.debian)]
            error.hint = "without a registry: " + nearest(name.partition(":")[0], without_registry)
        raise


def _local(entry: CatalogImage, store: ImageStore, program: str) -> Image | None:
    """Return a copy of a catalog image that has the program: pulled under its reference, or built under its name."""
    pulled = store.find(entry.oci) if entry.oci_has(program) else None
    return pulled or (store.find(entry.name) if entry.debian_has(program) else None)


def _fetched(
    entry: CatalogImage,
    store: ImageStore,
    detection: Detection,
    progress: ProgressCallback,
    may_fetch: bool,
    guest: Guest | None,
) -> Choice:
    if not may_fetch:
        raise NotFound(f"the image {entry.name!r} is not on this machine", hint=f"`atoll image pull {entry.oci}`")
    if guest is not None:
        guest = replace(guest, anywhere=True)  # the catalog is the operator's
    program = "" if detection.explicit else detection.program
    try:
        if not entry.oci_has(program) and entry.debian_has(program):
            raise NotFound(f"{entry.oci} has no `{program}`")
        return Choice(store.pull(entry.oci, progress=progress, guest=guest), f"{detection.why}; pulled {entry.oci}")
    except _TRY_NEXT as pull_error:
        if not entry.debian_has(program):
            raise
        try:
            built = store.build_debian(entry.name, entry.debian, progress, catalog_build=True)
        except AtollError as build_error:
            raise _both_failed(entry, pull_error, build_error) from build_error
        instead = f"{entry.oci} could not be pulled, this is {built.notes[0] if built.notes else 'of Debian packages'}"
        progress(Progress("done", instead))
        return Choice(built, f"{detection.why}; {instead}")


def _both_failed(entry: CatalogImage, pull_error: AtollError, build_error: AtollError) -> AtollError:
    kind = Unsupported if isinstance(build_error, Unsupported) else ImageError
    return kind(
        f"the image {entry.name!r} can be neither pulled ({pull_error.message}) nor built ({build_error.message})",
        hint=build_error.hint or pull_error.hint,
        details={"pull": pull_error.to_wire(), "build": build_error.to_wire()},
    )
