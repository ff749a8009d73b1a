"""`sandbox connect` and `sandbox login`: this machine set up for a gateway. What they say goes to stderr.

A key is exchanged for a client certificate over TLS that was verified, and is not written anywhere.
"""

from __future__ import annotations

import os
import shutil
import tempfile

from atoll.cli.connection import Choice, choose, open_remote, replace, use_directory, write_profile, write_settings
from atoll.cli.grammar import UsageError
from atoll.cli.output import FAILED, print_json, say
from atoll.cli.session import data_directory, open_link, setting
from atoll.client import calls
from atoll.errors import AtollError, InvalidArgument, Unsupported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from atoll.cli.grammar import Arguments

LINK = "k8e-sandbox-cli"


def login(arguments: Arguments) -> int:
    choice = choose(arguments)
    if choice.is_local:
        raise InvalidArgument("login needs --endpoint host:port", hint="the local daemon needs no login")
    if not choice.api_key and not os.path.exists(os.path.join(choice.cert_dir, "client.crt")):
        raise InvalidArgument("login needs an API key", hint="set ATOLL_APIKEY, or give --apikey")
    _log_in(choice, arguments.device_name or "", None)
    write_settings(mode="remote", endpoint=choice.endpoint)
    return 0


def connect(arguments: Arguments) -> int:
    if arguments.skip_skill and arguments.skill_only:
        raise UsageError("--skip-skill and --skill-only exclude each other")
    if arguments.skill_only:
        return _teach(arguments.agent)
    kept = _reset(arguments) if arguments.reset_certs else None
    try:
        return _connect(arguments, kept)
    finally:
        if kept is not None:
            os.unlink(kept)


def _connect(arguments: Arguments, kept: str | None) -> int:
    key = arguments.apikey or setting("APIKEY")
    if key and not (arguments.endpoint or setting("ENDPOINT") or choose(_without_key(arguments)).endpoint):
        raise InvalidArgument("a key without an endpoint", hint="give --endpoint host:port")
    if arguments.reset_certs and not key:
        say("nothing else was changed; connect again with --endpoint and a key")
        return 0
    choice = choose(arguments)
    local = choice.is_local or (_is_loopback(choice.endpoint) and not key)
    if not arguments.skip_verify:
        _verify(arguments, choice, kept)
    agents: list[str] = []
    code = 0 if arguments.skip_skill else _teach(arguments.agent, agents)
    if not arguments.skip_path:
        _linkinstalled_program()
    write_settings(mode="local" if local else "remote", endpoint=choice.endpoint, agents=agents)
    profile = {"endpoint": choice.endpoint, "cert_dir": choice.cert_dir, "device_name": choice.device}
    path = write_profile("default", {name: value for name, value in profile.items() if value})
    say(f"connected to {choice.endpoint or 'the local daemon'}; profile `default` is in {path}")
    return code


def _verify(arguments: Arguments, choice: Choice, kept: str | None) -> None:
    if choice.is_local:
        link = open_link(arguments)
    else:
        if choice.api_key:
            try:
                _log_in(choice, "", kept)
            except Unsupported:
                say("this gateway issues no certificates; keep ATOLL_APIKEY set")
        link = open_remote(choice)
    health = link.call(calls.get("/v1/health"))
    link.close()
    say(f"{choice.endpoint or 'the local daemon'} answers (atoll {health.get('version')})")


def _log_in(choice: Choice, device: str, ca: str | None) -> None:
    use_directory(choice)
    from ..sdk.login import log_in

    ca = None if setting("CERT") else ca
    done = log_in(choice.endpoint, choice.api_key or None, device_name=device, ca_cert=ca)
    say(f"logged in as {done.name!r}; the certificate in {done.directory} is valid for {done.valid_days} days")


def _reset(arguments: Arguments) -> str | None:
    """Remove the four files, whatever state everything else is in. The CA stays known for this one call."""
    try:
        directory = choose(arguments).cert_dir
    except AtollError:
        directory = data_directory()
    kept = None
    authority = os.path.join(directory, "ca.crt")
    if os.path.isfile(authority):
        handle, kept = tempfile.mkstemp(prefix="atoll-ca-")
        os.close(handle)
        shutil.copyfile(authority, kept)
    removed = []
    for name in ("ca.crt", "client.crt", "client.key", "endpoint"):
        path = os.path.join(directory, name)
        if not os.path.lexists(path):
            continue
        try:
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        except OSError as failure:
            raise InvalidArgument(f"cannot remove {path}: {failure.strerror}") from None
        removed.append(name)
    say(f"removed from {directory}: {', '.join(removed)}" if removed else f"no certificates in {directory}")
    return kept


def _teach(agent: str, taught: list[str] | None = None) -> int:
    """The skill for coding agents, and a copy of it in the data directory; a failure is told and makes the exit code."""
    failed = install_skill(agent, taught)
    if failed:
        print_json({"ok": False, "error": "skill_not_installed", "detail": "; ".join(failed), "retry": "no"})
        return FAILED
    return 0


def install_skill(agent: str, taught: list[str] | None = None) -> list[str]:
    """Install the skill for these agents; what went wrong, in words."""
    from atoll.skill.install import FAILED as BROKEN
    from atoll.skill.install import Installer, skill_text
    from atoll.skill.targets import K8E, Place, chosen

    place = Place(os.path.abspath(os.path.expanduser("~")), os.getcwd())
    try:
        targets = chosen(agent, "auto", place)
    except ValueError as bad:
        raise InvalidArgument(str(bad)) from None
    installer = Installer(K8E, place)
    for target in targets:
        installer.install(target)
    for step in installer.steps:
        say(f"{step.mark} {step.path}" + (f" ({step.note})" if step.note else ""))
    if taught is not None:
        taught += targets
    failed = [f"{step.path}: {step.note}" for step in installer.steps if step.mark == BROKEN]
    try:
        replace(os.path.join(data_directory(), "skills", K8E, "SKILL.md"), skill_text(K8E), 0o644)
    except AtollError as failure:
        failed.append(failure.message)
    return failed


def _linkinstalled_program() -> None:
    """`k8e-sandbox-cli` in ~/.local/bin when there is none on PATH; never over something that is there."""
    from atoll.cli.installed import installed_program

    if shutil.which(LINK):
        return
    path = os.path.join(os.path.expanduser("~"), ".local", "bin", LINK)
    try:
        target = installed_program()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    except FileExistsError:
        say(f"{path} is there already and stays as it is")
    except (OSError, InvalidArgument) as failure:
        say(f"no link {path}: {failure}")
    else:
        say(f"{path} -> {target}")


def _without_key(arguments: Arguments) -> Arguments:
    from atoll.cli.grammar import Arguments as Made

    return Made([], {"context": arguments.context}, arguments.verb)


def _is_loopback(endpoint: str) -> bool:
    from atoll.client.route import is_loopback, parse_endpoint

    return is_loopback(parse_endpoint(endpoint)[0])
