"""The first file of the standalone program: unpacks the rest once for this user, then runs it from there.

Python compiles what lies on a disk once and what lies in an archive at every start, so that an unpacked program starts faster. Where
nothing can be written the archive itself is run.
"""

import os
import sys
import zipfile


def unpacked(archive: str) -> str:
    """Return the directory with the content of the archive, made if it is not there; the archive where that cannot be done."""
    with zipfile.ZipFile(archive) as packed:
        digest = packed.read("digest").decode("ascii")
        base = os.environ.get("LOCALAPPDATA") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        place = os.path.join(base, "atoll", "standalone", digest)
        if ours(place):
            return place
        try:
            os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
            fresh = f"{place}.{os.getpid()}"
            os.mkdir(fresh, 0o700)
            packed.extractall(fresh)
            os.rename(fresh, place)  # whole or not at all: another start may look meanwhile
        except OSError:
            pass  # another start was quicker, or this place cannot be written
    return place if ours(place) else archive


def ours(place: str) -> bool:
    """Tell whether a directory is there and nobody else can have put something into it."""
    try:
        found = os.lstat(place)
    except OSError:
        return False
    if os.name == "nt":
        return os.path.isdir(place)
    return (
        os.path.isdir(place)
        and not os.path.islink(place)
        and found.st_uid == os.geteuid()
        and not found.st_mode & 0o022
    )


if sys.version_info < (3, 11):  # noqa: UP036  # whoever starts it may have any
    sys.exit("Python 3.11 or later is needed; this is " + sys.version.split()[0])
sys.path[0] = unpacked(sys.path[0])

from atoll.cli import main  # noqa: E402  # it is only there now

sys.exit(main())
