"""The catalog, what commands and projects select from it, and the operator's allowlist."""

from pathlib import Path

import pytest

from atoll.errors import ImageNotAllowed, InvalidArgument
from atoll.images import Allowlist, Catalog, detect
from atoll.images.detect import host_program
from atoll.images.registry.reference import Reference

CATALOG = Catalog.load()

TABLE = {
    "node:22-alpine": (
        "node npm npx yarn pnpm bun tsx ts-node",
        "package.json package-lock.json yarn.lock pnpm-lock.yaml bun.lockb",
    ),
    "rust:1.85-alpine": ("cargo rustc rustup rustfmt clippy", "Cargo.toml Cargo.lock"),
    "golang:1.23-alpine": ("go gofmt", "go.mod go.sum"),
    "python:3.12-alpine": (
        "python python3 pip pip3 poetry uv pytest ruff",
        "pyproject.toml requirements.txt setup.py setup.cfg Pipfile poetry.lock uv.lock",
    ),
    "ruby:3.3-alpine": ("ruby gem bundle bundler rake rails", "Gemfile Gemfile.lock x.gemspec"),
    "eclipse-temurin:21-alpine": (
        "java javac mvn gradle gradlew",
        "pom.xml build.gradle build.gradle.kts settings.gradle Main.kt",
    ),
    "mcr.microsoft.com/dotnet/sdk:8.0": ("dotnet csc fsc", "a.csproj a.fsproj a.sln global.json"),
    "gcc:14-bookworm": ("gcc g++ clang clang++ make cmake cc", "Makefile CMakeLists.txt configure a.c a.cpp a.h"),
    "php:8.3-alpine": ("php composer", "composer.json composer.lock index.php"),
    "elixir:1.16-alpine": ("elixir mix iex", "mix.exs mix.lock"),
    "alpine:3.20": ("sh bash zsh ash", "run.sh"),
    "nickblah/lua:5.4-alpine": ("lua luajit luarocks", "a.lua .luacheckrc"),
    "hashicorp/terraform:1.10": ("terraform", "main.tf a.tfvars terraform.tfstate"),
}
COMMANDS = [(command, image) for image, (commands, _) in TABLE.items() for command in commands.split()]
FILES = [(file, image) for image, (_, files) in TABLE.items() for file in files.split()]


def reference_of(name: str) -> str:
    entry = CATALOG.get(name)
    assert entry is not None
    return entry.oci


@pytest.mark.parametrize(("command", "image"), COMMANDS)
def test_ak_P3_command_selects_the_image(command: str, image: str, tmp_path: Path) -> None:
    """The command's first word selects, also with a path, and before any project file."""
    (tmp_path / "package.json").touch()
    for word in (command, f"/usr/bin/{command}", f"./{command}"):
        found = detect([word, "x"], tmp_path, CATALOG)
        assert reference_of(found.image_name) == str(Reference.parse(image)) and command in found.why


@pytest.mark.parametrize(("file", "image"), FILES)
def test_project_file_selects_the_image(file: str, image: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    found = detect(["unknown-program"], tmp_path, CATALOG)
    assert reference_of(found.image_name) == str(Reference.parse(image)) and file in found.why


def test_rows_come_in_the_order_of_the_contract(tmp_path: Path) -> None:
    """Of several matching files the first row wins, whatever the names sort like."""
    for _, (_, files) in reversed(TABLE.items()):
        (tmp_path / files.split()[0]).touch()
    assert [reference_of(name) for name in CATALOG.names()] == [str(Reference.parse(image)) for image in TABLE]
    for image, (_, files) in TABLE.items():
        assert reference_of(detect(["x"], tmp_path, CATALOG).image_name) == str(Reference.parse(image))
        (tmp_path / files.split()[0]).unlink()


def test_falls_back_to_the_default(tmp_path: Path) -> None:
    for where in (tmp_path, None, tmp_path / "missing"):
        found = detect(["unknown"], where, CATALOG)
        assert reference_of(found.image_name) == "docker.io/library/alpine:3.20" and not found.explicit
    assert detect([], None, CATALOG).image_name == "base"


def test_ak_K9_explicit_image_wins(tmp_path: Path) -> None:
    """A named image wins over the command, the project's files and a Dockerfile."""
    for name in ("Dockerfile", "package.json", "agentkernel.toml"):
        (tmp_path / name).write_text("FROM evil\n" if name == "Dockerfile" else "")
    found = detect(["python3"], tmp_path, CATALOG, explicit="ubuntu:24.04")
    assert (found.image_name, found.explicit) == ("ubuntu:24.04", True)
    assert detect(["x"], tmp_path, CATALOG).image_name == "node"


def test_project_config_comes_before_project_files(tmp_path: Path) -> None:
    """agentkernel.toml: base_image beats runtime; both come after the command and before files."""
    (tmp_path / "package.json").touch()
    config = tmp_path / "agentkernel.toml"
    config.write_text('[sandbox]\nname = "x"\nruntime = "go"\n')
    assert detect(["x"], tmp_path, CATALOG).image_name == "go"
    assert detect(["python3"], tmp_path, CATALOG).image_name == "python"
    config.write_text('[sandbox]\nruntime = "go"\nbase_image = "ubuntu:24.04"\n')
    assert detect(["x"], tmp_path, CATALOG).image_name == "ubuntu:24.04"
    config.write_text('[sandbox]\nruntime = "cobol"\n')
    with pytest.raises(InvalidArgument, match="cobol"):
        detect(["x"], tmp_path, CATALOG)
    config.write_text("[sandbox\n")
    with pytest.raises(InvalidArgument, match="TOML"):
        detect(["x"], tmp_path, CATALOG)


def test_procfile_comes_last(tmp_path: Path) -> None:
    (tmp_path / "Procfile").write_text("# web: php\n\nweb: unknown-server\nworker: bundle exec work\n")
    found = detect(["x"], tmp_path, CATALOG)
    assert found.image_name == "ruby" and "worker" in found.why
    (tmp_path / "go.mod").touch()
    assert detect(["x"], tmp_path, CATALOG).image_name == "go"


def test_runtime_words() -> None:
    for word in ("python", "node", "go", "rust", "ruby", "java", "c", "dotnet", "base"):
        assert CATALOG.for_runtime(word).name == word


def test_iii_Q17_presets() -> None:
    """The presets come first and in order, and stand for entries that exist."""
    assert [preset.name for preset in CATALOG.presets] == ["python", "node"]
    assert CATALOG.presets[0].oci == "docker.io/iiidev/python:latest"
    assert all(CATALOG.get(preset.image) for preset in CATALOG.presets)


def test_custom_names() -> None:
    catalog = Catalog.load({"ml": "registry.example.com/ml/base:2"})
    entry = catalog.get("ml")
    assert entry is not None and (entry.oci, entry.kind) == ("registry.example.com/ml/base:2", "custom")
    for name in ("", "python", "host", "a/b", "a:b"):
        with pytest.raises(InvalidArgument):
            Catalog.load({name: "x"})
    with pytest.raises(InvalidArgument):
        Catalog.load({"ml": "not a reference"})


def test_iii_Q16_allowlist_fails_closed() -> None:
    """Without a list all is allowed; with one only what it names; an empty one allows nothing."""
    Allowlist.of(None).check("anything:1", CATALOG)
    allowed = Allowlist.of(["python", "registry.example.com/team/app:1", "host"])
    for name in (
        "python",
        "docker.io/library/python:3.12-alpine",
        "python:3.12-alpine",
        "registry.example.com/team/app:1",
        "host",
    ):
        allowed.check(name, CATALOG)
    for name in ("node", "python:3.13", "registry.example.com/team/app:2", "registry.example.com/team/app", "Python"):
        with pytest.raises((ImageNotAllowed, InvalidArgument)):
            allowed.check(name, CATALOG)
    with pytest.raises(ImageNotAllowed) as caught:
        allowed.check("node", CATALOG)
    assert caught.value.details["allowed"] == ["python", "registry.example.com/team/app:1", "host"]
    assert "registry.example.com/team/app:1" in caught.value.hint
    for name in ("python", "host"):
        with pytest.raises(ImageNotAllowed):
            Allowlist.of([]).check(name, CATALOG)


def test_finds_host_programs_below_usr_only(tmp_path: Path) -> None:
    """A program counts if it really lies below /usr and everyone may run it."""
    binaries, home = tmp_path / "usr/bin", tmp_path / "home"
    binaries.mkdir(parents=True)
    home.mkdir()
    for path, mode in ((binaries / "tool", 0o755), (binaries / "private", 0o700), (home / "mine", 0o755)):
        path.write_text("#!/bin/sh\n")
        path.chmod(mode)
    (binaries / "alias").symlink_to("tool")
    (binaries / "escape").symlink_to(home / "mine")
    (tmp_path / "bin").symlink_to("usr/bin")
    assert host_program("tool", tmp_path) == binaries / "tool" == host_program("alias", tmp_path)
    assert host_program("/bin/tool", tmp_path) == binaries / "tool"
    for name in ("private", "escape", "missing", "", "./tool", "/home/mine", "../usr/bin/tool", "bin"):
        assert host_program(name, tmp_path) is None
