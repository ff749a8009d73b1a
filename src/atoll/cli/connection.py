"""Choose the gateway of a command: flags, environment, connection profiles and `config.json`, in that order.

Only read when one of them is there; without any, the local daemon is used and this file is never imported. A key is never
kept: `login` and `connect` turn it into a client certificate, and what is written down holds no secret.
"""

from __future__ import annotations

import os
import stat

from ..client.codec import dumps, loads
from ..client.portable import CLOSE_ON_EXEC, NO_FOLLOW, is_linux
from ..errors import AtollError, DaemonUnreachable, InvalidArgument, PermissionDenied, Unavailable
from .session import data_directory, is_k8e, keep_data_directory, setting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..client._sync.driver import Link
    from .grammar import Arguments

MAX_FILE = 1024 * 1024
DEFAULT_ENDPOINT = "127.0.0.1:50051"
LOCAL_ONLY = ("daemon", "serve")


class Choice:
    """The chosen connection. An empty endpoint is the local daemon on its Unix socket."""

    def __init__(self, endpoint: str, api_key: str, profile: str = "", cert_dir: str = "", device: str = "") -> None:
        self.endpoint = endpoint
        self.api_key = api_key
        self.profile = profile
        self.cert_dir = cert_dir or data_directory()
        self.device = device

    @property
    def is_local(self) -> bool:
        return not self.endpoint or self.endpoint.startswith("unix:")


def choose(arguments: Arguments) -> Choice:
    """Decide: flag, environment, profile, then config.json where no profile applies."""
    values = arguments.values
    endpoint = values.get("endpoint") or setting("ENDPOINT") or ""
    key = values.get("apikey") or setting("APIKEY") or ""
    named = values.get("context") or setting("CONTEXT") or setting("PROFILE") or ""
    if endpoint and not named:
        return Choice(endpoint, key)
    profile, entry = _profile(named)
    if not profile and not endpoint:
        endpoint = str(read_settings().get("endpoint") or "")
    endpoint = endpoint or entry.get("endpoint", "")
    if key and not endpoint:
        endpoint = DEFAULT_ENDPOINT
    directory = os.path.expanduser(entry.get("cert_dir", ""))
    return Choice(endpoint, key, profile, directory, entry.get("device_name", ""))


def open_chosen(arguments: Arguments, start: bool) -> Link:
    """The link a command line asks for."""
    from ..client._sync.driver import Link

    if arguments.verb.split(" ")[0] in LOCAL_ONLY:
        endpoint = arguments.values.get("endpoint") or ""
        if endpoint and not endpoint.startswith("unix:"):
            raise InvalidArgument(f"`{arguments.verb}` is about the local daemon", hint="leave --endpoint out")
        return open_unix(endpoint) if endpoint else Link(start=start)
    choice = choose(arguments)
    if not choice.endpoint:
        return Link(start=start)
    if choice.endpoint.startswith("unix:"):
        return open_unix(choice.endpoint)
    return open_remote(choice)


def open_unix(endpoint: str) -> Link:
    from ..client._sync.driver import Link

    path = endpoint.removeprefix("unix:")
    return Link(path="/" + path.lstrip("/") if path.startswith("/") else path, start=False)


def open_remote(choice: Choice) -> Link:
    """The same face over verified TLS; a certificate that ends soon is renewed on the way."""
    use_directory(choice)
    from ..client.links import open_link

    try:
        if os.path.exists(os.path.join(choice.cert_dir, "client.crt")):
            from ..surfaces.k8e.sdk.login import renew_if_due

            renew_if_due(choice.endpoint)
        return open_link(None, choice.endpoint, choice.api_key or None)
    except DaemonUnreachable:
        raise
    except Unavailable as failure:
        raise DaemonUnreachable(failure.message, hint=failure.hint or "") from None


def use_directory(choice: Choice) -> None:
    """From here on certificates are this choice's; the state files stay where they are."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a refused handshake is our error to report, not gRPC's
    keep_data_directory()
    os.environ["ATOLL_CERT_DIR"] = choice.cert_dir
    if choice.device and not setting("DEVICE_NAME"):
        os.environ["ATOLL_DEVICE_NAME"] = choice.device


def profiles_file() -> str:
    """The file profiles are read from; it need not exist."""
    named = setting("CONFIG")
    if named:
        return os.path.expanduser(named)
    own = os.path.join(data_directory(), "profiles.yaml")
    legacy = os.path.join(os.path.expanduser("~"), ".k8e", "config.yaml")
    if is_k8e() and not os.path.exists(own) and os.path.exists(legacy):
        from .output import say

        say(f"warning: {legacy} is an old place for profiles; move it to {own}")
        return legacy
    return own


def read_profiles(path: str) -> dict[str, Any]:
    """The file's content, checked; empty when there is none."""
    text = _read(path, guarded=True)
    if text is None:
        return {}
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as bad:
        raise InvalidArgument(f"{path} is not YAML: {str(bad).splitlines()[0]}") from None
    if found is None:
        return {}
    profiles = (found.get("profiles") or {}) if isinstance(found, dict) else None
    if not isinstance(profiles, dict) or found.get("version", 1) != 1:
        raise InvalidArgument(f"{path} is not a file of profiles", hint="it has `version: 1` and `profiles:`")
    for name, entry in profiles.items():
        if not isinstance(name, str) or not isinstance(entry, dict):
            raise InvalidArgument(f"{path}: profile {name!r:.60} is not a mapping")
        for key, value in entry.items():
            if key not in ("endpoint", "cert_dir", "device_name"):
                raise InvalidArgument(f"{path}: profile {name!r:.60} has an unknown key {key!r:.60}")
            if value is not None and not isinstance(value, str):
                raise InvalidArgument(f"{path}: {key} of profile {name!r:.60} is not text")
    return dict(found)


def write_profile(name: str, entry: dict[str, str]) -> str:
    """Put one profile into the file, make it the current one, and leave the others."""
    import yaml

    path = os.path.expanduser(setting("CONFIG") or os.path.join(data_directory(), "profiles.yaml"))
    found = read_profiles(path)
    profiles = {**(found.get("profiles") or {}), name: entry}
    replace(path, yaml.safe_dump({"version": 1, "current_profile": name, "profiles": profiles}, sort_keys=False))
    return path


def read_settings() -> dict[str, Any]:
    """config.json, as connect and login write it; empty when there is none."""
    path = os.path.join(data_directory(), "config.json")
    text = _read(path, guarded=True)
    if text is None:
        return {}
    try:
        found = loads(text.encode())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path} is not a JSON object", hint="remove it, or run `atoll sandbox connect` again")
    return found


def write_settings(**fields: Any) -> None:
    kept = {key: value for key, value in {**read_settings(), **fields}.items() if value}
    replace(os.path.join(data_directory(), "config.json"), dumps(kept) + "\n")


def replace(path: str, text: str, mode: int = 0o600) -> None:
    """The whole file or the old one, never half."""
    fresh = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_FOLLOW | CLOSE_ON_EXEC, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            if is_linux():
                os.fchmod(out.fileno(), mode)
            out.write(text)
        os.replace(fresh, path)
    except OSError as failure:
        raise InvalidArgument(f"cannot write {path}: {failure.strerror}") from None


def _profile(named: str) -> tuple[str, dict[str, str]]:
    path = profiles_file()
    if setting("CONFIG") and not os.path.exists(path):
        raise InvalidArgument(f"there is no file of profiles at {path}")
    found = read_profiles(path)
    profiles = found.get("profiles") or {}
    name = named or str(found.get("current_profile") or "") or ("default" if "default" in profiles else "")
    if not name:
        return "", {}
    if name not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        raise InvalidArgument(f"no connection profile {name!r:.60}", hint=f"profiles in {path}: {known}")
    return name, {key: value for key, value in profiles[name].items() if value}


def _read(path: str, *, guarded: bool) -> str | None:
    """A small text file. Guarded: one that others may write decides nothing, because it says where code is sent."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if guarded and is_linux() and (status.st_uid not in (0, os.geteuid()) or _writable_by_others(status)):
                raise PermissionDenied(f"{path} can be written by others, so it is not used", hint=f"chmod go-w {path}")
            return file.read(MAX_FILE).decode()
    except FileNotFoundError:
        return None
    except OSError as failure:
        raise InvalidArgument(f"cannot read {path}: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not UTF-8") from None


def _writable_by_others(status: os.stat_result) -> bool:
    if not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    from ..ownership import writable_by_others

    return writable_by_others(status)


def explain(failure: AtollError) -> str:
    return failure.message + (f" ({failure.hint})" if failure.hint else "")
