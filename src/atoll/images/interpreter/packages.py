"""Brings what the interpreter needs beside the machine's own programs: Python packages and the TypeScript compiler.

Every file is pinned by its hash (`requirements.lock`, `TYPESCRIPT`). Only wheels are taken: nothing of a package runs
while it is installed. They are for the Python that sandboxes have, `/usr/bin/python3`.
"""

import base64
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from atoll.errors import DiskFull, ImageError, Unavailable, Unsupported
from atoll.images.layers.tree import OverlayFlavour
from atoll.images.progress import Progress, ProgressCallback, printable

HERE = Path(__file__).parent
LOCK = HERE / "requirements.lock"
INSIDE = HERE / "inside"
PYTHON = "/usr/bin/python3"
HOME = "local/lib/atoll-interpreter"  # below /usr: the programs
KERNELS = "local/share/jupyter/kernels"
SPECS = {
    "python3": ("Python", "python", (PYTHON, f"/usr/{HOME}/kernel.py")),
    "bash": ("Bash", "bash", (PYTHON, "-m", "bash_kernel")),
    "javascript": ("JavaScript", "javascript", (PYTHON, f"/usr/{HOME}/node_kernel.py")),
    "typescript": ("TypeScript", "typescript", (PYTHON, f"/usr/{HOME}/node_kernel.py")),
}
TYPESCRIPT = (
    "typescript/-/typescript-5.9.3.tgz",
    "jl1vZzPDinLr9eUt3J/t7V6FgNEw9QjvBPdysz9KfQDD41fQrC2Y4vKQdiaUpFT4bXlb1RHhLpp8wtm6M5TgSw==",  # SHA-512
)
_SECONDS = 1200
_MOST_ARCHIVE = 64 << 20
_MOST_SOURCE = 32 << 20
_RESERVE = 1 << 30  # bytes that must be free


@dataclass(frozen=True, slots=True)
class Python:
    """The Python of sandboxes: its version, and the first place below /usr/local where it looks for packages."""

    version: str
    place: str


def find_python() -> Python:
    """Return the machine's own Python, or Unsupported."""
    code = (
        "import json,site,sys;print(json.dumps(['.'.join(map(str,sys.version_info[:2])),"
        "[p for p in site.getsitepackages() if p in sys.path or p.startswith('/usr/local/')]]))"
    )
    try:
        done = subprocess.run([PYTHON, "-I", "-c", code], capture_output=True, timeout=60, check=True)
        version, places = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        raise Unsupported(
            f"this machine has no {PYTHON}, which the image code-interpreter-v1 is made of",
            hint="install the distribution's python3",
        ) from None
    local = [place for place in places if place.startswith("/usr/")]
    if not local:
        raise Unsupported(f"{PYTHON} looks for packages in no place below /usr")
    return Python(version, sorted(local, key=lambda place: not place.startswith("/usr/local/"))[0])


def key_of(python: Python) -> str:
    """Return what tells one set of packages from another."""
    text = json.dumps([LOCK.read_text(), TYPESCRIPT, python.version, python.place, os.uname().machine])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def install(
    target: Path, python: Python, flavour: OverlayFlavour, ca_file: Path | None, progress: ProgressCallback
) -> None:
    """Fill the empty directory `target`, a layer over /usr. About a minute, and 350 MB."""
    if shutil.disk_usage(target).free < _RESERVE:
        raise DiskFull("there is not enough room for the interpreter's packages", hint="run `atoll image prune`")
    site = target / Path(python.place).relative_to("/usr")
    site.mkdir(parents=True)
    # Packages that the machine's owner has there would mix with ours.
    _make_opaque(site, flavour)
    _install_python(site, python, ca_file, progress)
    progress(Progress("build", "fetching the TypeScript compiler"))
    home = target / HOME
    home.mkdir(parents=True)
    (home / "typescript.js").write_bytes(_fetch_typescript(ca_file))
    for directory, _, names in os.walk(target):
        os.chmod(directory, 0o755)
        for name in names:
            os.chmod(os.path.join(directory, name), 0o644)


def write_programs(target: Path) -> None:
    """Fill the empty directory `target`, a layer over /usr, with our own programs and the kernels' descriptions."""
    home = target / HOME
    home.mkdir(parents=True)
    for name in sorted(os.listdir(INSIDE)):
        if name.endswith((".py", ".js")) and name != "__init__.py":
            shutil.copyfile(INSIDE / name, home / name)
    for name, (title, language, argv) in SPECS.items():
        place = target / KERNELS / name
        place.mkdir(parents=True)
        last = [language] if language in ("javascript", "typescript") else []
        spec = {"argv": [*argv, "-f", "{connection_file}", *last], "display_name": title, "language": language}
        (place / "kernel.json").write_text(json.dumps(spec))
    _compile(home)
    for directory, _, names in os.walk(target):
        os.chmod(directory, 0o755)
        for file in names:
            os.chmod(os.path.join(directory, file), 0o644)


def programs_key() -> str:
    """Return what tells one version of our programs from another."""
    digest = hashlib.sha256(repr(SPECS).encode())
    for name in sorted(os.listdir(INSIDE)):
        if name.endswith((".py", ".js")):
            digest.update(f"\0{name}\0".encode() + (INSIDE / name).read_bytes())
    return digest.hexdigest()[:32]


def _make_opaque(place: Path, flavour: OverlayFlavour) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flavour.make_opaque(fd)
    finally:
        os.close(fd)


def _install_python(site: Path, python: Python, ca_file: Path | None, progress: ProgressCallback) -> None:
    command = [
        *_pip(), "install", "--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes", "--only-binary=:all:",
        "--no-compile", "--progress-bar=off", "--python-version", python.version, "--implementation", "cp",
        "--target", str(site), "-r", str(LOCK), *(["--cert", str(ca_file)] if ca_file else []),
    ]  # fmt: skip
    progress(Progress("build", "fetching Python packages: about 100 MB"))
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = printable(raw.decode("utf-8", "replace").strip())[:300]
                lines = [*lines[-20:], line]
                if line.startswith(("Collecting", "Installing")):
                    progress(Progress("build", line[:120]))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        wrong = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip said nothing")
        raise ImageError(
            f"the interpreter's packages cannot be installed: {wrong}",
            hint="PyPI must be reachable once (pip's own settings hold), for a Python of 3.11 or newer",
            details={"log": lines},
        )
    shutil.rmtree(site / "bin", ignore_errors=True)
    progress(Progress("build", "compiling"))
    _compile(site)


def _pip() -> list[str]:
    """Return the command of a pip: the daemon's, or else the machine's."""
    for python in (sys.executable, PYTHON):
        tried = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, timeout=60, check=False)
        if tried.returncode == 0:
            return [python, "-m", "pip"]
    raise Unsupported("pip is needed to build the image code-interpreter-v1", hint="install the package python3-pip")


def _compile(place: Path) -> None:
    """Compile as the Python inside would, which cannot write there."""
    command = [
        PYTHON,
        "-I",
        "-m",
        "compileall",
        "-q",
        "-j",
        "0",
        "--invalidation-mode",
        "unchecked-hash",
        "-s",
        str(place),
    ]
    subprocess.run([*command, str(place)], capture_output=True, timeout=_SECONDS, check=False)


def _fetch_typescript(ca_file: Path | None) -> bytes:
    path, expected = TYPESCRIPT
    set_for_npm = os.environ.get("npm_config_registry")  # noqa: SIM112  # that is its name
    registry = set_for_npm or "https://registry.npmjs.org/"
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    url = f"{registry.rstrip('/')}/{path}"
    try:
        with urllib.request.urlopen(url, timeout=120, context=context) as answer:  # pinned by its hash
            data = answer.read(_MOST_ARCHIVE)
    except (OSError, urllib.error.URLError) as error:
        raise Unavailable(
            f"the TypeScript compiler cannot be fetched: {error}", hint="npm's registry must be reachable once"
        ) from None
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != expected:
        raise ImageError(f"{url} is not the file that was expected")
    with tarfile.open(fileobj=BytesIO(data), mode="r:gz") as archive:
        member = archive.extractfile("package/lib/typescript.js")
        if member is None:
            raise ImageError("the TypeScript compiler is not in its package")
        return member.read(_MOST_SOURCE)
