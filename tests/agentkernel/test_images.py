"""Images by name, on real sandboxes: pulled from a registry with TLS and a login, kept while in use, and allowlisted."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.images import Member, RegistryServer, build_image, make_tar, running_registry

from .conftest import Cli

PROGRAMS = ("/bin/sh", "/bin/cat", "/bin/ls")


def _layer(marker: bytes) -> bytes:
    """A root file system of a few programs of this machine with what they link to."""
    files = {os.path.realpath(program): program for program in PROGRAMS}
    for program in list(files):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for found in re.findall(r"(/\S+) \(0x", listed):
            files[found] = found
    members = [Member("etc/marker", marker)]
    for source, target in files.items():
        members.append(Member(os.path.normpath(target).lstrip("/"), Path(source).read_bytes(), mode=0o755))
    return make_tar(*members)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed (Debian package docker-registry)")
    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(scope="module")
def shop(registry: RegistryServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A daemon that trusts the registry, with a login for it and an allowlist."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    login = tmp_path_factory.mktemp("login")
    registry.docker_config(login)
    home = tempfile.mkdtemp(prefix="ati-")
    allowed = ", ".join(f'"{registry.address}/team/{name}"' for name in ("app:1", "other:1"))
    Path(home, "config.toml").write_text(
        f'[images]\nca_file = "{registry.ca}"\nallow = ["host", {allowed}]\n[images.custom]\nhouse = "{registry.address}/team/app:1"\n'
    )
    os.chmod(Path(home, "config.toml"), 0o600)
    registry.push(
        "team/app", "1", build_image(_layer(b"from the image\n"), config={"Env": ["FROM_IMAGE=yes", "PATH=/bin"]})
    )
    registry.push("team/other", "1", build_image(_layer(b"other\n")))
    made = Cli(home, str(tmp_path_factory.mktemp("work")))
    made.env["DOCKER_CONFIG"] = str(login)
    yield made
    made("daemon", "stop", "--force")
    shutil.rmtree(home, ignore_errors=True)


def test_ak_P4_K9_an_explicit_image_is_what_runs(shop: Cli, registry: RegistryServer) -> None:
    Path(shop.directory, "Dockerfile").write_text("FROM scratch\n")
    Path(shop.directory, "package.json").write_text("{}")
    ref = f"{registry.address}/team/app:1"
    done = shop.ok(
        "run", "--image", ref, "sh", "-c", "cat /etc/marker; echo $FROM_IMAGE; ls /usr/bin/python3 2>/dev/null || true"
    )
    assert done.stdout == b"from the image\nyes\n", done
    assert shop.ok("run", "--image", "house", "cat", "/etc/marker").stdout == b"from the image\n"
    changed = shop.ok("run", "--image", ref, "sh", "-c", "echo x > /etc/marker; cat /etc/marker")
    assert changed.stdout == b"x\n"
    assert (
        shop.ok("run", "--image", ref, "cat", "/etc/marker").stdout == b"from the image\n"
    )  # others see nothing of it
    missing = shop("run", "--image", ref, "python3", "-c", "1")
    assert missing.code == 127 and b"--image" in missing.stderr


def test_pull_list_inspect_and_remove(shop: Cli, registry: RegistryServer) -> None:
    ref = f"{registry.address}/team/other:1"
    pulled = shop.ok("image", "pull", ref)
    assert ref in pulled.text and b"download" in pulled.stderr
    assert ref in [image["name"] for image in shop.ok("image", "list", "--json").json["images"]]
    assert ref in shop.ok("image", "list").text
    digest = shop.ok("image", "inspect", ref).json["digest"]
    shop.ok("sandbox", "create", "keeper", "--image", ref)
    try:
        used = shop("image", "rm", ref)
        assert used.code == 125 and b"in use" in used.stderr  # also by one that was never started
        shop.ok("image", "prune")
        shop.ok("start", "keeper")
        assert shop.ok("exec", "keeper", "cat", "/etc/marker").stdout == b"other\n"
        assert shop.ok("sandbox", "info", "keeper").json["image"] == ref
    finally:
        shop.ok("remove", "keeper")
    shop.ok("image", "rm", ref)
    assert digest not in shop.ok("image", "list", "--json").text


def test_an_image_that_is_not_listed_is_refused(shop: Cli, registry: RegistryServer) -> None:
    done = shop("run", "--image", f"{registry.address}/team/secret:1", "true")
    assert done.code == 125 and b"not allowed" in done.stderr and b"team/app" in done.stderr
    assert shop("image", "pull", f"{registry.address}/team/secret:1").code == 125
    created = shop("sandbox", "create", "nope", "--image", "alpine:3.20")
    assert created.json["error"] == "image_not_allowed"
