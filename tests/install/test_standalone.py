"""The client as one file: it runs through a symlink, against a gateway and the local daemon, and trusts no cache of others."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.command_line import WAIT, environment
from lab.grpc_daemon import GrpcDaemon, started
from lab.sandboxes import SOURCE

ROOT = Path(SOURCE).parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it, and return the link by which it is called."""
    place = tmp_path_factory.mktemp("standalone")
    command = [sys.executable, "scripts/build_standalone.py", "--output", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = place.iterdir()
    assert made.name in ("k8e-sandbox-cli-linux-amd64", "k8e-sandbox-cli-linux-arm64")
    link = place / "k8e-sandbox"
    link.symlink_to(made.name)
    return link


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Run:
    """Start it as a user who has nothing but a Python."""

    def call(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        alone = {name: value for name, value in environment(str(tmp_path / "atoll")).items() if name != "PYTHONPATH"}
        alone |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        path = f"{os.path.dirname(sys.executable)}:{alone['PATH']}"
        command = [sys.executable, "-I", str(program), *words]
        return subprocess.run(
            command, env={**alone, "PATH": path, **env}, capture_output=True, text=True, timeout=WAIT, cwd=tmp_path
        )

    return call


@pytest.fixture(scope="module")
def gateway() -> Iterator[dict[str, str]]:
    daemon = GrpcDaemon("")
    with started(daemon):
        ca = daemon.home / "elsewhere.crt"
        ca.write_text(daemon.ca)
        key = daemon.key("standalone")
        yield {
            "K8E_SANDBOX_ENDPOINT": f"localhost:{daemon.port}", "K8E_SANDBOX_APIKEY": key, "K8E_SANDBOX_CERT": str(ca),
            "ATOLL_RUNTIME": "container", "ATOLL_TEST_HOME": str(daemon.home),
        }  # fmt: skip


def test_k8e_P33_one_file_runs_through_a_symlink(run: Run, gateway: dict[str, str]) -> None:
    """Over TLS with a key, and beside the local daemon; without the word `sandbox` too, as K8E's program has it."""
    hello = run("sandbox", "run", "print('hello')", "--lang", "python", **gateway)
    assert hello.returncode == 0 and json.loads(hello.stdout)["stdout"] == "hello\n", hello
    status = run("status", **gateway)
    assert json.loads(status.stdout)["available"] is True, status
    local = run("sandbox", "list", ATOLL_HOME=gateway["ATOLL_TEST_HOME"])
    assert local.returncode == 0 and "sandboxes" in json.loads(local.stdout), local
    assert "k8e-sandbox" in run("help").stdout


def test_alone_it_says_that_it_is_the_client(run: Run) -> None:
    done = run("sandbox", "list")
    assert done.returncode == 2 and "client alone" in done.stdout and "Traceback" not in done.stderr, done


def test_a_cache_that_others_can_write_is_not_believed(run: Run, tmp_path: Path) -> None:
    first = run("version")
    (place,) = (tmp_path / "cache/atoll/standalone").iterdir()
    (place / "atoll/__init__.py").write_text("raise SystemExit('from the cache')\n")
    assert "from the cache" in run("version").stderr, "it is what is run"
    place.chmod(0o777)
    assert run("version").stdout == first.stdout
    (tmp_path / "file").touch()
    assert run("version", XDG_CACHE_HOME=str(tmp_path / "file")).stdout == first.stdout, "nothing can be written"


def test_two_builds_give_the_same_file(program: Path, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/build_standalone.py", "--output", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    (again,) = tmp_path.iterdir()
    assert again.read_bytes() == program.read_bytes()
