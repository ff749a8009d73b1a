"""From flags and a project's file to the fields of a new sandbox: permissions, mounts, environment, limits, hosts.

Flags beat the file. Single keys of a file that was only found may narrow what flags chose and never widen it.
"""

from __future__ import annotations

import os

from atoll.cli.grammar import UsageError
from atoll.client import calls
from atoll.errors import InvalidArgument, PermissionDenied, Unsupported
from atoll.profiles import NATIVE, SECCOMP, Policy, merge, mode_name, profile_name

from .words import called_agentkernel, image_name, runtime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from atoll.cli.grammar import Arguments
    from atoll.client._sync.driver import Link
    from atoll.client.wire import MountFields, SandboxFields

    from .project import Keys, Project

MOST_NAMES, MOST_TEXT = 10_000, 65_536  # of a directory's files, and of a Procfile
USUAL_LIMITS = {"memory_mb": 512, "cpus": 1.0}  # below these an operator's default is a wish to narrow
_NARROW = {"network": False, "mount_cwd": False, "mount_home": False, "pass_env": False, "read_only": True}
_STRICTNESS = {name: place for place, name in enumerate(("default", "moderate", "ai-agent", "restrictive"))}
assert set(_STRICTNESS) == set(SECCOMP)


def combine(arguments: Arguments, project: Project | None) -> tuple[Policy, str | None, Keys]:
    """The merge rule on what was asked here and what the file says; with it the profile and the single keys that count."""
    try:
        mode = None if arguments.compatibility_mode is None else mode_name(arguments.compatibility_mode)
        profile = None if arguments.profile is None else profile_name(arguments.profile)
    except InvalidArgument as bad:
        raise UsageError(bad.message, bad.hint) from None
    no_network = bool(arguments.no_network)
    if project is None:
        return merge(mode=mode, profile=profile, no_network=no_network), profile, {}
    keys = project.keys
    if project.found and (mode is not None or profile is not None):
        chosen = merge(mode=mode, profile=profile)
        keys = {key: value for key, value in keys.items() if _narrows(key, value, chosen)}
    mode, profile = mode or project.mode, profile or project.profile
    return merge(mode=mode, profile=profile, keys=keys, no_network=no_network), profile, keys


def _narrows(key: str, value: Any, chosen: Policy) -> bool:
    if key == "seccomp":
        return _STRICTNESS[value] > _STRICTNESS[chosen.seccomp]
    return bool(value == _NARROW[key])


def create_fields(arguments: Arguments, project: Project | None, link: Link) -> SandboxFields:
    """The fields of CreateSandbox, without image and name."""
    policy, profile, keys = combine(arguments, project)
    env = dict(policy.env)
    if policy.pass_env:
        env.update(_own_environment())
    env.update(dict(arguments.env))
    fields: SandboxFields = {
        "runtime": runtime(arguments.backend or arguments.values.get("runtime")),
        "profile": profile,
        "mode": policy.mode,
        "network": not arguments.no_network,
        "env": env or None,
        "security": {key: value for key, value in keys.items() if key in ("network", "read_only", "seccomp")} or None,
        "mounts": _mounts(policy) or None,
        "volumes": _volumes(arguments.values.get("volume")),
        "limits": _limits(arguments, policy, project, link),
        "hosts": _hosts(arguments, policy, project, link),
        "more_hosts": arguments.values.get("allow_host") or None,
    }
    if policy.profile == "permissive" and policy.mode is None and fields["hosts"] is None:
        fields["mode"] = NATIVE
    return {key: value for key, value in fields.items() if value is not None}  # type: ignore[return-value]


def _own_environment() -> dict[str, str]:
    """The caller's environment without what names places on this machine."""
    skipped = ("PATH", "HOME", "PWD", "OLDPWD", "TMPDIR", "ATOLL_HOME")
    found = {}
    for key, value in os.environ.items():
        try:
            value.encode("utf-8"), key.encode("utf-8")
        except UnicodeEncodeError:
            continue
        if key not in skipped and len(key) <= 256:
            found[key] = value
    return found


def _volumes(texts: list[str] | None) -> list[dict[str, object]] | None:
    if not texts:
        return None
    from atoll.cli.volumes import read_volumes

    return read_volumes(texts)


def _build(arguments: Arguments, project: Project | None) -> str:
    """Return the digest of the project's own image, built if it is not known."""
    from .build import build_project  # no other run needs what uploads and builds

    return build_project(arguments, project)


def _mounts(policy: Policy) -> list[MountFields]:
    mounts: list[MountFields] = []
    if policy.mount_home:
        home = os.path.realpath(os.path.expanduser("~"))
        mounts.append({"source": home, "target": "/home/user", "read_only": True})
    if policy.mount_cwd:
        here = os.path.realpath(os.getcwd())
        if here == "/":
            raise InvalidArgument("the working directory is /, which is not a project to mount", hint="cd to one first")
        mounts.append({"source": here, "target": "/workspace", "read_only": False})
    return mounts


def _limits(arguments: Arguments, policy: Policy, project: Project | None, link: Link) -> Mapping[str, float] | None:
    limits: dict[str, float] = {}
    if project is not None:
        for name, key in (("memory_mb", "memory_mb"), ("cpus", "vcpus")):
            value = project.get("resources", key)
            if value is not None:
                limits[name] = value
        if limits and project.found:
            _check_narrowed(project, limits, link)
    for name, value in (("memory_mb", arguments.memory), ("cpus", arguments.cpus)):
        if value is not None:
            limits[name] = value
    return limits or None


def _check_narrowed(project: Project, limits: Mapping[str, float], link: Link) -> None:
    """A found file may not go above what the operator's own settings cut down."""
    settings = link.call(calls.get("/v1/config")).get("limits") or {}
    for name, value in limits.items():
        most = settings.get(name)
        if most is not None and most < USUAL_LIMITS[name] and value > most:
            raise PermissionDenied(
                f"{project.path} asks for {name} {value}; this machine's operator set {most}",
                hint=f"if you trust it: --config {os.path.basename(project.path)}",
            )


def _hosts(arguments: Arguments, policy: Policy, project: Project | None, link: Link) -> list[str] | None:
    """The list to ask for; None leaves it to the mode or to the default."""
    given = arguments.allowed_hosts
    if given is not None:
        return [] if given == ["none"] else list(given)
    if project is None or not policy.network:
        return None
    allow = _spread(project.get("security.domains", "allow") or [])
    block = _spread(project.get("security.domains", "block") or [])
    alone = bool(project.get("security.domains", "allowlist_only"))
    if not allow and not block and not alone:
        return None
    if project.found:
        _check_operator_hosts(project, allow, link)
    start = [] if alone else _start_list(policy, link)
    return _without(dict.fromkeys([*start, *allow]), block, project.path)


def _start_list(policy: Policy, link: Link) -> list[str]:
    name = policy.mode or (NATIVE if called_agentkernel() or policy.profile == "permissive" else "run")
    answer = link.call(calls.get("/v1/policy/hosts", {"of": name}))
    return list(answer["hosts"])


def _check_operator_hosts(project: Project, allow: list[str], link: Link) -> None:
    settings = link.call(calls.get("/v1/config")).get("sandboxes") or {}
    operator = settings.get("hosts")
    if operator is None or "*" in operator:
        return
    beyond = [host for host in allow if not any(_covers(entry, host) for entry in operator)]
    if beyond:
        raise PermissionDenied(
            f"{project.path} asks for {beyond[0]!r:.120}, which this machine's operator does not list",
            hint=f"if you trust it: --config {os.path.basename(project.path)}",
        )


def _spread(hosts: list[str]) -> list[str]:
    """There `*.x` means x and all below it; here it means what is below."""
    return [name for host in hosts for name in ((host[2:], host) if host.startswith("*.") else (host,))]


def _without(hosts: dict[str, None], block: list[str], path: str) -> list[str]:
    kept = [host for host in hosts if not any(_covers(blocked, host) for blocked in block)]
    for blocked in block:
        through = next((host for host in kept if _covers(host, blocked)), None)
        if through is not None:
            raise Unsupported(
                f"{path}: {blocked} cannot be blocked while {through} is allowed",
                hint="list the hosts you need with allowlist_only = true",
            )
    return kept


def _covers(entry: str, host: str) -> bool:
    name, host = entry.partition(":")[0], host.partition(":")[0]
    if name == "*":
        return True
    return host.endswith(name[1:]) if name.startswith("*.") else name == host


def choose_image(arguments: Arguments, project: Project | None, argv: list[str], link: Link) -> tuple[str, str | None]:
    """The image's name, and the program it was detected for (None when a person named the image)."""
    if arguments.values.get("build"):
        if arguments.image:
            raise InvalidArgument("--build and --image cannot be used together")
        return _build(arguments, project), None
    if arguments.image:
        return image_name(arguments.image), None
    program = argv[0] if argv else ""
    if project is not None and not project.found:
        named = _project_image(arguments, project, program, link)
        if named is not None:
            return named
    if program:
        known = link.call(calls.get("/v1/images/detect", {"program": program})).get("image")
        if known:
            return str(known), program
    named = _project_image(arguments, project, program, link) if project is not None else None
    return named or (_detect(link, program, names=_entries(), procfile=_procfile()), program)


def _project_image(arguments: Arguments, project: Project, program: str, link: Link) -> tuple[str, str | None] | None:
    base = project.get("sandbox", "base_image")
    if base:
        return image_name(base), None
    word = project.get("sandbox", "runtime")
    if word is None and project.data.get("build"):
        return _build(arguments, project), None
    return None if word is None else (_detect(link, "", runtime=word), program)


def _detect(link: Link, program: str, **known: Any) -> str:
    """The daemon's answer: the catalog is its, and this process would take long to load one."""
    return str(link.call(calls.post("/v1/images/detect", {"program": program, **known}, repeatable=True))["image"])


def _entries() -> list[str]:
    try:
        names = os.listdir()
    except OSError:
        return []
    return [name for name in names if name.isprintable()][:MOST_NAMES]  # others mean nothing, and some are not text


def _procfile() -> str | None:
    try:
        descriptor = os.open("Procfile", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            return file.read(MOST_TEXT).decode("utf-8", "ignore")
        except OSError:  # a directory, or a pipe nobody writes to
            return None
