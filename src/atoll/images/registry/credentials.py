"""Registry logins people already have: `~/.docker/config.json` and the credential helpers it names."""

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import ImageError
from atoll.images.registry.reference import DEFAULT_REGISTRY

_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_HELPER_SECONDS = 30
_MAX_CONFIG_BYTES = 4 << 20
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io")
_IDENTITY_USER = "<token>"


@dataclass(frozen=True, slots=True)
class Login:
    """One login: a user with a password, or an identity token to be exchanged."""

    username: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)


class DockerConfig:
    """Looks a registry up in Docker's (or Podman's) configuration files; the first file that knows it wins."""

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        self._files = tuple(files) if files is not None else default_files()

    def login(self, registry: str) -> Login | None:
        """The login for a registry, or None if there is none; a broken file is an error, not an anonymous pull."""
        for path in self._files:
            config = _load(path)
            if config is None:
                continue
            found = self._from_helper(config, registry) or _from_auths(config, registry)
            if found is not None:
                return found
        return None

    def _from_helper(self, config: Mapping[str, object], registry: str) -> Login | None:
        helpers = config.get("credHelpers")
        for key in _keys(registry):
            if isinstance(helpers, dict) and isinstance(helpers.get(key), str):
                return _ask_helper(helpers[key], key)
        store = config.get("credsStore")
        if not isinstance(store, str) or not store:
            return None
        for key in _keys(registry):
            found = _ask_helper(store, key)
            if found is not None:
                return found
        return None


def default_files() -> tuple[Path, ...]:
    """Where `docker login` and `podman login` write."""
    docker = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    files = [docker]
    if os.environ.get("XDG_RUNTIME_DIR"):
        files.append(Path(os.environ["XDG_RUNTIME_DIR"]) / "containers" / "auth.json")
    return tuple(files)


def _load(path: Path) -> Mapping[str, object] | None:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from error
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ImageError(f"{path} is not valid JSON", hint="mend it, or log in again") from error
    return config if isinstance(config, dict) else None


def _keys(registry: str) -> tuple[str, ...]:
    if registry == DEFAULT_REGISTRY:
        return _HUB_KEYS
    return (registry, f"https://{registry}", f"http://{registry}")


def _host(key: str) -> str:
    return re.sub(r"^https?://", "", key).split("/", 1)[0].lower()


def _from_auths(config: Mapping[str, object], registry: str) -> Login | None:
    auths = config.get("auths")
    if not isinstance(auths, dict):
        return None
    wanted = {_host(key) for key in _keys(registry)}
    for key, value in auths.items():
        if _host(key) in wanted and isinstance(value, dict):
            found = _from_entry(value)
            if found is not None:
                return found
    return None


def _from_entry(entry: Mapping[str, object]) -> Login | None:
    username, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    auth = entry.get("auth")
    if isinstance(auth, str) and auth:
        try:
            decoded = base64.b64decode(auth, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ImageError("a login in the Docker configuration is not readable", hint="log in again") from error
        username, _, password = decoded.partition(":")
        password = password.rstrip("\0")
    token = str(entry.get("identitytoken") or "")
    return Login(username, password, token) if username or token else None


def _ask_helper(helper: str, key: str) -> Login | None:
    if _HELPER_NAME.fullmatch(helper) is None:
        raise ImageError(f"not the name of a credential helper: {helper!r}")
    program = f"docker-credential-{helper}"
    try:
        answer = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_SECONDS, check=False
        )
    except FileNotFoundError:
        raise ImageError(f"the Docker configuration names {program}, which is not installed") from None
    except subprocess.TimeoutExpired:
        raise ImageError(f"{program} did not answer within {_HELPER_SECONDS} seconds") from None
    if answer.returncode != 0:
        if b"not found" in (answer.stdout + answer.stderr).lower():
            return None
        raise ImageError(f"{program} failed with exit status {answer.returncode}")
    try:
        fields = json.loads(answer.stdout)
        username, secret = str(fields["Username"]), str(fields["Secret"])
    except (ValueError, KeyError, TypeError):
        raise ImageError(f"{program} gave an answer that is not a login") from None
    if username == _IDENTITY_USER:
        return Login("", "", secret)
    return Login(username, secret) if username else None
