"""Logins from Docker's configuration: plain entries, helpers, and what a broken file does."""

import base64
import json
import os
from pathlib import Path

import pytest

from atoll.errors import ImageError
from atoll.images import DockerConfig
from atoll.images.registry.credentials import Login


def config(tmp_path: Path, value: object) -> DockerConfig:
    path = tmp_path / "config.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return DockerConfig([path])


def encoded(text: str) -> dict[str, str]:
    return {"auth": base64.b64encode(text.encode()).decode()}


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A credential helper as a real program on PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    program = directory / "docker-credential-lab"
    program.write_text(
        '#!/bin/sh\nread -r server\n[ "$1" = get ] || exit 9\n'
        'case "$server" in\n'
        '  secret.example.com) echo \'{"Username":"bob","Secret":"hunter2"}\' ;;\n'
        '  token.example.com) echo \'{"Username":"<token>","Secret":"refresh"}\' ;;\n'
        "  broken.example.com) echo nonsense ;;\n"
        "  *) echo 'credentials not found in native keychain'; exit 1 ;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return program


@pytest.mark.parametrize(
    "key", ["reg.example.com", "https://reg.example.com", "https://reg.example.com/v2/", "http://reg.example.com"]
)
def test_reads_plain_entries(tmp_path: Path, key: str) -> None:
    found = config(tmp_path, {"auths": {key: encoded("alice:pass:word")}})
    assert found.login("reg.example.com") == Login("alice", "pass:word")
    assert found.login("other.example.com") is None and found.login("example.com") is None
    assert found.login("reg.example.com:5000") is None


def test_reads_docker_hub_under_its_old_name(tmp_path: Path) -> None:
    found = config(tmp_path, {"auths": {"https://index.docker.io/v1/": encoded("alice:x")}})
    assert found.login("docker.io") == Login("alice", "x")


def test_identity_tokens(tmp_path: Path) -> None:
    found = config(tmp_path, {"auths": {"r.io": {"identitytoken": "refresh"}}}).login("r.io")
    assert found is not None and found.identity_token == "refresh"


def test_asks_helpers(tmp_path: Path, helper: Path) -> None:
    """A helper for one registry, or for all; not found means no login, nonsense is an error."""
    one = config(tmp_path, {"credHelpers": {"secret.example.com": "lab"}, "auths": {"x.io": encoded("a:b")}})
    assert one.login("secret.example.com") == Login("bob", "hunter2") and one.login("x.io") == Login("a", "b")
    every = config(
        tmp_path, {"credsStore": "lab", "auths": {"plain.example.com": encoded("a:b"), "secret.example.com": {}}}
    )
    assert every.login("secret.example.com") == Login("bob", "hunter2")
    assert every.login("token.example.com") == Login("", "", "refresh")
    assert every.login("plain.example.com") == Login("a", "b") and every.login("unknown.example.com") is None
    with pytest.raises(ImageError, match="not a login"):
        every.login("broken.example.com")


def test_helper_names_cannot_be_paths(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "a b", "-x"):
        with pytest.raises(ImageError):
            config(tmp_path, {"credsStore": name}).login("x.io")
    with pytest.raises(ImageError, match="not installed"):
        config(tmp_path, {"credsStore": "surely-missing"}).login("x.io")


def test_a_broken_file_is_an_error(tmp_path: Path) -> None:
    """A file that cannot be read must not turn a private pull into an anonymous one without a word."""
    with pytest.raises(ImageError, match="JSON"):
        config(tmp_path, "{").login("x.io")
    with pytest.raises(ImageError):
        config(tmp_path, {"auths": {"x.io": {"auth": "%%%"}}}).login("x.io")
    assert DockerConfig([tmp_path / "missing"]).login("x.io") is None
    assert config(tmp_path, "[]").login("x.io") is None


def test_logins_do_not_show_their_secret() -> None:
    assert "hunter2" not in repr(Login("bob", "hunter2", "hunter2"))
