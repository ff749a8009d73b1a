"""`install.sh`: what it says, what it makes, and that removing leaves nothing."""

import os
import subprocess
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
    import shutil
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="ati-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def run(home: Path, *words: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    given = {"PATH": os.environ["PATH"], "HOME": str(home), "ATOLL_HOME": str(home / "data"), **(env or {})}
    places = ("--prefix", str(home / "opt"), "--bin", str(home / "bin"))
    return subprocess.run(
        ["sh", SCRIPT, *words, *places], env=given, capture_output=True, text=True, stdin=subprocess.DEVNULL
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
