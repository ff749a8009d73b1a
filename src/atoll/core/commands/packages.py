"""Python packages of a sandbox: the one rule of what may be installed, and how."""

from collections.abc import Iterable

from atoll.errors import InvalidArgument
from atoll.model import ExecSpec, convert

PIP_SECONDS = 120
MAX_PACKAGES = 1000


def pip_install(packages: Iterable[str], **options: object) -> ExecSpec:
    """Return the command that installs these packages.

    An option in the place of a package is refused: it would change where pip installs from.
    """
    wanted = list(packages)
    if not 1 <= len(wanted) <= MAX_PACKAGES or not all(name.strip() for name in wanted):
        raise InvalidArgument(f"1 to {MAX_PACKAGES} packages are needed")
    for name in wanted:
        if name.strip().startswith("-") or "\0" in name:
            raise InvalidArgument(
                f"{name!r:.80} is not a package",
                hint="to give pip options, run `pip install` as a command",
            )
    argv = ["python3", "-m", "pip", "install", "--no-cache-dir", "--", *wanted]
    return convert(ExecSpec, {"argv": argv, "timeout_ms": PIP_SECONDS * 1000, **options})
