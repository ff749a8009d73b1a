"""Detect the image for a command or a project when none was named.

The order is: an image named explicitly, the command's first word, the project's own `agentkernel.toml`, the project's
files, its Procfile, the default. Files are looked at by name; nothing in a project is run or built for being there.
"""

import os
import posixpath
import stat
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import InvalidArgument
from atoll.images.catalog import Catalog, CatalogImage
from atoll.images.sources.host_mask import OTHER_NAMES

_MAX_FILE_BYTES = 1 << 20
_MAX_ENTRIES = 10_000
_CONFIG = "agentkernel.toml"
_HOST_PROGRAMS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "usr/games")


DEFAULT = "the default"  # why an image was chosen when neither command nor project says anything


@dataclass(frozen=True, slots=True)
class Detection:
    """The image, why it was chosen, and the program that has to be in it ("" when none is known)."""

    image_name: str
    why: str
    program: str = ""
    explicit: bool = False


@dataclass(frozen=True, slots=True)
class Project:
    """Facts from the files of a directory: the image or runtime its own file names, the names of its files, its
    Procfile."""

    base_image: str = ""
    runtime: str = ""
    names: Sequence[str] = ()
    procfile: str = ""

    @classmethod
    def at(cls, directory: Path) -> "Project":
        base_image, runtime = _config(directory)
        procfile = (_read_small(directory / "Procfile") or b"").decode("utf-8", "replace")
        return cls(base_image, runtime, _entries(directory), procfile)


def detect(
    argv: Sequence[str],
    project: Project | Path | None,
    catalog: Catalog,
    *,
    explicit: str | None = None,
) -> Detection:
    """Choose an image. `project` is None where there is none, as over HTTP."""
    program = argv[0] if argv else ""
    if explicit:
        return Detection(explicit, "named explicitly", program, explicit=True)
    word = posixpath.basename(program)
    by_command = _by_command(word, catalog)
    if by_command is not None:
        return Detection(by_command.name, f"the command `{word}`", program)
    if isinstance(project, Path):
        project = Project.at(project)
    if project is not None:
        found = _by_config(project, catalog) or _by_files(project, catalog) or _by_procfile(project, catalog)
        if found is not None:
            name, why, named = found
            return Detection(name, why, program, explicit=named)
    return Detection(catalog.default, DEFAULT, program)


def host_program(program: str, root: Path = Path("/")) -> Path | None:
    """Where the `host` image has this program: below /usr, a file everyone may run."""
    if not program or "\0" in program:
        return None
    if "/" in program:
        places = [program.lstrip("/")] if program.startswith("/") else []
    else:
        names = (program, OTHER_NAMES[program]) if program in OTHER_NAMES else (program,)
        places = [f"{directory}/{name}" for name in names for directory in _HOST_PROGRAMS]
    for place in places:
        path = Path(os.path.realpath(root / place))
        if not path.is_relative_to(root / "usr"):
            continue
        try:
            found = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) and found.st_mode & 0o005 == 0o005:
            return path
    return None


def _by_command(word: str, catalog: Catalog) -> CatalogImage | None:
    return next((image for image in catalog.images if word in image.commands), None)


def _by_config(project: Project, catalog: Catalog) -> tuple[str, str, bool] | None:
    """`[sandbox] base_image`, else `runtime`, of the project's own file."""
    if project.base_image:
        return project.base_image, f"`base_image` in {_CONFIG}", True
    if project.runtime:
        return catalog.for_runtime(project.runtime).name, f"`runtime` in {_CONFIG}", False
    return None


def _config(directory: Path) -> tuple[str, str]:
    try:
        text = (_read_small(directory / _CONFIG) or b"").decode()
        sandbox = tomllib.loads(text).get("sandbox", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{_CONFIG} is not valid TOML: {error}") from error
    values = [sandbox.get(key) if isinstance(sandbox, dict) else None for key in ("base_image", "runtime")]
    base_image, runtime = (value if isinstance(value, str) else "" for value in values)
    return base_image, runtime


def _by_files(project: Project, catalog: Catalog) -> tuple[str, str, bool] | None:
    for image in catalog.images:
        for pattern in image.files:
            found = _match(pattern, project.names)
            if found is not None:
                return image.name, f"the file `{found}`", False
    return None


def _match(pattern: str, names: Sequence[str]) -> str | None:
    if pattern.startswith("*"):
        return next((name for name in names if name.endswith(pattern[1:])), None)
    return pattern if pattern in names else None


def _by_procfile(project: Project, catalog: Catalog) -> tuple[str, str, bool] | None:
    for line in project.procfile.splitlines():
        kind, colon, command = line.partition(":")
        if not colon or kind.lstrip().startswith("#") or not command.split():
            continue
        image = _by_command(posixpath.basename(command.split()[0]), catalog)
        if image is not None:
            return image.name, f"`{kind.strip()}` in the Procfile", False
    return None


def _entries(project: Path) -> list[str]:
    names = []
    try:
        with os.scandir(project) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) >= _MAX_ENTRIES:
                    break
    except OSError:
        return []
    return sorted(names)


def _read_small(path: Path) -> bytes | None:
    """A small regular file, not waiting on anything else that may lie there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        text = file.read(_MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise InvalidArgument(f"{path.name} is larger than {_MAX_FILE_BYTES} bytes")
    return text
