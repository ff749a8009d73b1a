"""Images made of Debian packages, for machines that reach a package mirror but no container registry.

`mmdebstrap` writes the file system as a tar stream, from the package sources this machine itself uses; the stream goes
through the same unpacker as any layer, so the same rules hold. Nothing of the machine's own /etc gets in.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, cast

from atoll.errors import ImageError, InvalidArgument, Timeout, Unsupported
from atoll.images import catalog
from atoll.images.image import DEFAULT_PATH, Settings
from atoll.images.layers.layers import LayerStore
from atoll.images.progress import Progress, ProgressCallback, printable
from atoll.images.records import ImageRecord
from atoll.images.registry.platforms import Platform

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}(?::[a-z0-9-]{2,20})?(?:=[A-Za-z0-9.+~:-]{1,80})?")
_MAX_PACKAGES = 200
_BUILD_SECONDS = 1800
_KEPT_LINES = 15
_ERRORS = ("E:", "dpkg: error", "error:")  # how apt, dpkg and mmdebstrap itself begin theirs
_VARIANTS = ("essential", "apt", "minbase", "standard")
_APT_SETTINGS = ("Acquire::Check-Valid-Until", "Acquire::Retries", "Acquire::http::Proxy", "Acquire::https::Proxy")
_DPKG_OPTIONS = ("force-unsafe-io",)  # no waiting for the disk: a build that is cut off is thrown away as a whole
_SETTINGS_KEPT_INSIDE = ("Acquire::Check-Valid-Until",)


def build(packages: Sequence[str], layers: LayerStore, progress: ProgressCallback, *, variant: str) -> ImageRecord:
    """Build a file system with these packages and store it as one layer."""
    names = check_packages(packages)
    if variant not in _VARIANTS:
        raise InvalidArgument(f"unknown variant {variant!r}", hint=f"one of {', '.join(_VARIANTS)}")
    if shutil.which("mmdebstrap") is None:
        raise Unsupported(
            "building from Debian packages needs mmdebstrap, which is not installed",
            hint="install it with `apt-get install mmdebstrap`",
        )
    if _lacks_ids():
        raise Unsupported(
            "building from Debian packages as an ordinary user needs subordinate ids, and this user has none",
            hint="sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER",
        )
    sources = machine_sources()
    settings = apt_settings()
    program = _Program(names, sources, settings, variant, progress)
    inside = {key: value for key, value in settings.items() if key in _SETTINGS_KEPT_INSIDE}
    made_of: list[str] = []

    def finish(tree: Path) -> None:
        program.check()  # before the layer is stored: an empty stream is also a valid archive
        made_of.extend(f"Debian's {name} {version}" for name, version in versions(tree, names[:1]).items())
        _amend(tree, inside)

    with program as output:
        try:
            layer = layers.add(output, None, lambda _count: None, finish)
        except ImageError:
            if not output.closed and not output.read(1):
                program.check()  # a build that failed explains itself better than its cut-off output does
            raise
    return ImageRecord(
        digest=layer.digest,
        source="debian",
        layers=(layer.digest,),
        settings=Settings(env={"PATH": DEFAULT_PATH}),
        size=layer.size,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        platform=str(Platform.here()),
        notes=(*made_of, *(f"{text} ({count})" for text, count in sorted(layer.notes.items()))),
    )


def versions(tree: Path, packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages installed in a tree, as their authors number them: without Debian's epoch and revision."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for entry in (tree / "var/lib/dpkg/status").read_text(errors="replace").split("\n\n"):
            fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line and line[0] != " ")
            if fields.get("Package") in packages:
                upstream = re.sub(r"^\d+:", "", fields.get("Version", "")).rpartition("-")
                found[fields["Package"]] = re.split(r"[~+]", upstream[0] or upstream[2])[0]
    return found


def _lacks_ids() -> bool:
    """In a user namespace with a single id no package can be unpacked: they have files of several owners."""
    ranges = Path("/proc/self/uid_map").read_text().split()
    return os.geteuid() == 0 and sum(int(count) for count in ranges[2::3]) < 1000


def check_packages(packages: Sequence[str]) -> tuple[str, ...]:
    """Package names as apt has them: what begins with a dash or looks like a path is not one."""
    names = tuple(dict.fromkeys(name.strip() for name in packages if name.strip()))
    for name in names:
        if _PACKAGE.fullmatch(name) is None:
            raise InvalidArgument(f"not the name of a Debian package: {name!r}")
    if len(names) > _MAX_PACKAGES:
        raise InvalidArgument(f"{len(names)} packages are too many; {_MAX_PACKAGES} are accepted")
    return names


class _Program:
    """mmdebstrap at work: its tar stream is the context's value, its words go to `progress`."""

    def __init__(
        self,
        packages: tuple[str, ...],
        sources: tuple[str, ...],
        settings: dict[str, str],
        variant: str,
        progress: ProgressCallback,
    ) -> None:
        mode = "root" if os.geteuid() == 0 else "unshare"
        self._argv = ["mmdebstrap", f"--mode={mode}", f"--variant={variant}", "--format=tar"]
        self._argv += [f'--aptopt={key} "{value}"' for key, value in settings.items()]
        self._argv += [f"--dpkgopt={option}" for option in _DPKG_OPTIONS]
        if packages:
            self._argv.append(f"--include={','.join(packages)}")
        self._argv += ["", "-", *sources]
        self._progress = progress
        self._lines: list[str] = []
        self._errors: list[str] = []  # the first ones: what comes after them follows from them
        self._late = False
        self._stopped: BaseException | None = None

    def __enter__(self) -> BinaryIO:
        self._work = tempfile.TemporaryDirectory(prefix="atoll-debian-", ignore_cleanup_errors=True)
        os.chmod(self._work.name, 0o755)
        environment = {"PATH": os.environ.get("PATH") or DEFAULT_PATH, "LC_ALL": "C.UTF-8", "TMPDIR": self._work.name}
        environment["DEBIAN_FRONTEND"] = "noninteractive"
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=self._work.name,
            start_new_session=True,
        )
        self._timer = threading.Timer(_BUILD_SECONDS, self._expire)
        self._timer.daemon = True
        self._timer.start()
        self._listener = threading.Thread(target=self._listen, name="debian-build", daemon=True)
        self._listener.start()
        return cast(BinaryIO, self._process.stdout)

    def __exit__(self, *_exception: object) -> None:
        self._timer.cancel()
        if self._process.poll() is None:
            self._kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._work.cleanup()

    def check(self) -> None:
        """Raise what went wrong, in mmdebstrap's own last words."""
        if self._process.stdout is not None:
            self._process.stdout.close()
        status = self._process.wait()
        self._listener.join()
        if self._stopped is not None:
            raise self._stopped
        if self._late:
            raise Timeout(f"the build took longer than {_BUILD_SECONDS} seconds")
        if status != 0:
            errors = self._errors or self._lines[-1:]
            missing = next((line for line in errors if "Unable to locate package" in line), None)
            if missing is not None:
                raise InvalidArgument(f"the package sources have no such package: {missing.rpartition(' ')[2]}")
            raise ImageError(
                f"mmdebstrap failed with exit status {status}: {'; '.join(errors[:3]) or 'it said nothing'}",
                details={"log": list(self._lines), "errors": list(self._errors)},
            )

    def _listen(self) -> None:
        if self._process.stderr is None:
            return
        for raw in self._process.stderr:
            line = printable(raw.decode("utf-8", "replace").strip())[:300]
            if line:
                self._lines = [*self._lines[-_KEPT_LINES + 1 :], line]
                if line.startswith(_ERRORS) and len(self._errors) < _KEPT_LINES:
                    self._errors.append(line)
                self._report(line)

    def _report(self, line: str) -> None:
        """A callback that raises stops the build; the exception is raised again where the build was asked for."""
        if self._stopped is not None:
            return
        try:
            self._progress(Progress("build", line))
        except BaseException as error:
            self._stopped = error
            os.killpg(self._process.pid, signal.SIGTERM)

    def _expire(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGTERM)  # it unmounts what it mounted, then leaves
            self._process.wait(timeout=20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)


def _amend(tree: Path, settings: dict[str, str]) -> None:
    """Remove what the build took from this machine, and the marker that keeps pip from installing."""
    for marker in tree.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    (tree / "etc/apt/apt.conf.d/99mmdebstrap").unlink(missing_ok=True)
    (tree / "etc/dpkg/dpkg.cfg.d/99mmdebstrap").unlink(missing_ok=True)
    texts = {"etc/hostname": "sandbox\n", "etc/resolv.conf": ""}
    if settings and (tree / "etc/apt/apt.conf.d").is_dir():
        texts["etc/apt/apt.conf.d/99atoll"] = "".join(f'{key} "{value}";\n' for key, value in settings.items())
    for name, text in texts.items():
        (tree / name).unlink(missing_ok=True)
        (tree / name).write_text(text)


@dataclass(frozen=True, slots=True)
class _AptSource:
    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str

    def lines(self, codename: str) -> Iterator[str]:
        """One-line entries for the suites of this release: a vendor's extra repository is not part of an image."""
        option = f"[signed-by={self.signed_by}] " if self.signed_by.startswith("/") else ""
        for uri in self.uris:
            for suite in self.suites:
                if suite == codename or suite.startswith(f"{codename}-"):
                    yield f"deb {option}{uri} {suite} {' '.join(self.components)}"


def machine_sources(etc: Path = Path("/etc")) -> tuple[str, ...]:
    """The distribution's own package sources as this machine has them, else the catalog's default mirror."""
    codename = _codename(etc / "os-release")
    found: list[str] = []
    paths = [etc / "apt/sources.list", *sorted((etc / "apt/sources.list.d").glob("*"))]
    for path in paths if codename else []:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        parsed = _parse_deb822(text) if path.suffix == ".sources" else _parse_lines(text)
        for source in parsed:
            found.extend(source.lines(codename))
    return tuple(dict.fromkeys(found)) or catalog.default_debian_sources()


def apt_settings() -> dict[str, str]:
    """How this machine's apt reaches its sources: proxy, retries, and whether old indexes are accepted."""
    if shutil.which("apt-config") is None:
        return {}
    dumped = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, timeout=30, check=False).stdout
    settings: dict[str, str] = {}
    for line in dumped.splitlines():
        key, _, value = line.rstrip(";").partition(" ")
        if key in _APT_SETTINGS and value.strip('"') and '"' not in value.strip('"'):
            settings[key] = value.strip('"')
    return settings


def _codename(path: Path) -> str:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', text, re.MULTILINE)
    return found.group(1) if found else ""


def _parse_deb822(text: str) -> Iterator[_AptSource]:
    for stanza in re.split(r"\n\s*\n", text):
        unfolded = re.sub(r"\n[ \t]+", " ", re.sub(r"(?m)^#.*\n?", "", stanza))
        fields = {
            key.lower(): value.strip() for key, _, value in (line.partition(":") for line in unfolded.splitlines())
        }
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() not in ("no", "false"):
            yield _AptSource(
                tuple(fields.get("uris", "").split()),
                tuple(fields.get("suites", "").split()),
                tuple(fields.get("components", "").split()),
                fields.get("signed-by", ""),
            )


def _parse_lines(text: str) -> Iterator[_AptSource]:
    for line in text.splitlines():
        match = re.fullmatch(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*)(?:#.*)?", line.strip())
        if match:
            options = dict(item.partition("=")[::2] for item in (match[1] or "").split())
            yield _AptSource((match[2],), (match[3],), tuple(match[4].split()), options.get("signed-by", ""))
