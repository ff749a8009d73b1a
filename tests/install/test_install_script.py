"""`install.sh`: what it says, what it makes, and that removing leaves nothing."""

import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.sandboxes import SOURCE

SCRIPT = Path(SOURCE).parent / "install.sh"
PLAIN = ("--yes", "--no-packages", "--no-gvisor", "--no-service")
long_only = pytest.mark.skipif(
    not os.environ.get("ATOLL_TEST_LONG"), reason="installs every dependency: make test-long"
)


@pytest.fixture
def home() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ati-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def run(
    home: Path, *words: str, env: dict[str, str] | None = None, script: Path = SCRIPT
) -> "subprocess.CompletedProcess[str]":
    given = {"PATH": os.environ["PATH"], "HOME": str(home), "ATOLL_HOME": str(home / "data"), **(env or {})}
    places = ("--prefix", str(home / "opt"), "--bin", str(home / "bin"))
    return subprocess.run(
        ["sh", script, *words, *places], env=given, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_a_dry_run_shows_the_plan_and_makes_nothing(home: Path) -> None:
    done = run(home, "--dry-run", "--no-service")
    assert (
        done.returncode == 0 and str(home / "opt") in done.stdout and str(home / "bin" / "k8e-sandbox") in done.stdout
    )
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--nonsense",), "unknown option --nonsense"),
        (("--offline", "/nowhere"), "is no directory"),
        (("--offline", "/usr"), "is no bundle"),
        (("--uninstall",), "was not installed by this script"),
    ],
)
def test_wrong_words_name_the_cause_and_make_nothing(home: Path, words: tuple[str, ...], told: str) -> None:
    done = run(home, "--yes", *words)
    assert done.returncode == 1 and told in done.stderr
    assert list(home.iterdir()) == []


def test_a_failure_says_what_is_left(home: Path) -> None:
    done = run(home, *PLAIN, "--wheel", "/nowhere/atoll.whl")
    assert done.returncode != 0
    assert "failed while installing the program" in done.stderr and "--uninstall" in done.stderr
    assert run(home, "--uninstall", "--yes").returncode == 0
    assert not (home / "opt").exists()


def test_a_damaged_bundle_is_refused(home: Path) -> None:
    bundle = home / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "wheels" / "atoll.whl").write_text("edited")
    (bundle / "SHA256SUMS").write_text("0" * 64 + "  wheels/atoll.whl\n")
    done = run(home, *PLAIN, "--offline", str(bundle))
    assert done.returncode == 1 and "damaged" in done.stderr and not (home / "opt").exists()


def test_nothing_is_taken_without_a_checksum(home: Path) -> None:
    """A script of no release does not ask an index for whatever has the name `atoll`, and no URL is believed."""
    for words, told in (
        ((), "belongs to no release"),
        (("--wheel", "https://127.0.0.1:1/atoll.whl"), "needs its checksum"),
        (("--wheel", "http://127.0.0.1:1/atoll.whl", "--sha256", "0" * 64), "over https only"),
        (("--wheel", "atoll.whl", "--sha256", "0" * 63), "is no SHA-256"),
    ):
        done = run(home, *PLAIN, *words)
        assert done.returncode == 1 and told in done.stderr, done.stderr
        assert list(home.iterdir()) == []


def test_a_wheel_that_its_checksums_do_not_list_so_is_refused(home: Path) -> None:
    (home / "atoll.whl").write_text("edited")
    for words in (("--sha256", "0" * 64), ()):
        if not words:
            (home / "SHA256SUMS").write_text("0" * 64 + "  atoll.whl\n")
        done = run(home, *PLAIN, "--wheel", str(home / "atoll.whl"), *words)
        assert done.returncode == 1 and "another checksum" in done.stderr and not (home / "opt").exists()


def test_a_file_that_was_added_to_a_bundle_is_refused(home: Path) -> None:
    bundle = home / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "SHA256SUMS").write_text("")
    (bundle / "wheels" / "atoll-99-py3-none-any.whl").write_text("added")
    (bundle / "wheels" / "good").write_text("")
    (bundle / "SHA256SUMS").write_text(f"{hashlib.sha256(b'').hexdigest()}  wheels/good\n")
    done = run(home, *PLAIN, "--offline", str(bundle))
    assert done.returncode == 1 and "not in the bundle" in done.stderr and not (home / "opt").exists()


def test_a_releases_script_takes_its_own_wheel_and_known_dependencies_alone(home: Path, wheel: Path) -> None:
    """An index that offers other bytes under the right names gets nothing installed, the program's or a dependency's."""
    index = home / "index"
    index.mkdir()
    version = wheel.name.split("-")[1]
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CACHE_DIR": str(home / "cache")}
    script = home / "install.sh"
    release = f'release="{version}" release_sums="{"0" * 64} {hashlib.sha256(wheel.read_bytes()).hexdigest()}"\n'
    script.write_text(SCRIPT.read_text().replace('release="" release_sums=""\n', release))

    def install() -> str:
        done = run(home, *PLAIN, env=env, script=script)
        assert done.returncode != 0
        return done.stderr

    with zipfile.ZipFile(index / wheel.name, "w") as forged, zipfile.ZipFile(wheel) as good:
        for name in good.namelist():
            forged.writestr(name, good.read(name) + (b"evil = 1\n" if name == "atoll/__init__.py" else b""))
    assert "DO NOT MATCH THE HASHES" in install()
    assert not list((home / "opt").glob("venv/lib/*/site-packages/atoll"))
    shutil.copy(wheel, index / wheel.name)
    needed = zipfile.ZipFile(wheel).read("atoll/setup/requirements.lock").decode()
    first, number = next(line.split()[0].split("==") for line in needed.splitlines() if "==" in line)
    name = f"{first.replace('-', '_')}-{number}"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as forged:
        forged.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {first}\nVersion: {number}\n")
        forged.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        forged.writestr(f"{name}.dist-info/RECORD", "")
    assert "DO NOT MATCH THE HASHES" in install()
    assert list((home / "opt").glob("venv/lib/*/site-packages/atoll")), "the program itself was right"
    assert not list((home / "opt").glob(f"venv/lib/*/site-packages/{name}*"))


@long_only
def test_install_run_install_again_and_remove(home: Path, wheel: Path) -> None:
    first = run(home, *PLAIN, "--wheel", str(wheel))
    assert first.returncode == 0, first.stderr
    env = {**os.environ, "HOME": str(home), "ATOLL_HOME": str(home / "data"), "ATOLL_RUNTIME": "container"}
    for name in ("atoll", "k8e-sandbox"):
        hello = [str(home / "bin" / name), "sandbox", "run", "print('hello')", "--lang", "python", "--raw"]
        assert subprocess.run(hello, env=env, capture_output=True, text=True).stdout == "hello\n"
    assert run(home, *PLAIN, "--wheel", str(wheel)).returncode == 0
    removed = run(home, "--uninstall", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert [path.name for path in home.iterdir() if path.name not in ("bin", ".local", ".cache", ".rustup")] == []
    assert not any(
        path.is_file() or path.is_symlink() for path in home.rglob("*") if not {".cache", ".rustup"} & set(path.parts)
    )
