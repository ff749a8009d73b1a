"""Templates: project files by name. The built-in ones are a table here, a person's own are files below ATOLL_HOME."""

from __future__ import annotations

import os

from atoll.cli.output import print_json, tell
from atoll.cli.session import open_link, reference
from atoll.client import calls
from atoll.client.spawn import home_directory
from atoll.errors import AlreadyExists, InvalidArgument, NotFound
from atoll.profiles import nearest

from .project import Project, find
from .words import called_agentkernel, sandbox_name, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from atoll.cli.grammar import Arguments
    from atoll.client.wire import SandboxWire

# name: runtime word, CPUs, memory, profile, mode
BUILT_IN: dict[str, tuple[str, float, int, str, str | None]] = {
    "python": ("python", 1, 512, "moderate", None),
    "python-ml": ("python", 2, 4096, "moderate", None),
    "node": ("node", 1, 512, "moderate", None),
    "node-fullstack": ("node", 2, 2048, "moderate", None),
    "typescript": ("node", 1, 1024, "moderate", None),
    "rust": ("rust", 2, 2048, "moderate", None),
    "rust-ci": ("rust", 2, 4096, "moderate", None),
    "go": ("go", 2, 1024, "moderate", None),
    "ruby": ("ruby", 1, 512, "moderate", None),
    "java": ("java", 2, 2048, "moderate", None),
    "dotnet": ("dotnet", 2, 2048, "moderate", None),
    "bash": ("base", 1, 256, "moderate", None),
    "c": ("c", 1, 1024, "moderate", None),
    "secure": ("base", 0.5, 256, "restrictive", None),
    "claude-sandbox": ("node", 2, 2048, "moderate", "claude"),
    "codex-sandbox": ("node", 2, 2048, "moderate", "codex"),
    "gemini-sandbox": ("node", 2, 2048, "moderate", "gemini"),
}


def directory() -> str:
    if called_agentkernel() and not os.environ.get("ATOLL_HOME"):
        return os.path.join(os.path.expanduser("~"), ".local/share/agentkernel/templates")
    return os.path.join(home_directory(), "templates")


def load(name: str) -> Project:
    """A template as a project's file that a person named."""
    sandbox_name(name)
    path = os.path.join(directory(), name + ".toml")
    if os.path.exists(path):
        project = find(path, "")
        assert project is not None
        return project
    if name not in BUILT_IN:
        raise NotFound(f"no template is called {name!r}", hint=nearest(name, [*BUILT_IN, *_own()]))
    import tomllib

    return Project(f"template {name}", tomllib.loads(_text(name)), found=False)


def _text(name: str) -> str:
    runtime, cpus, memory, profile, mode = BUILT_IN[name]
    agent = f'\n[agent]\ncompatibility_mode = "{mode}"\n' if mode else ""
    return (
        f'[sandbox]\nname = "{name}"\nruntime = "{runtime}"\n{agent}\n[resources]\nvcpus = {cpus}\n'
        f'memory_mb = {memory}\n\n[security]\nprofile = "{profile}"\n'
    )


def _own() -> list[str]:
    try:
        return sorted(entry[:-5] for entry in os.listdir(directory()) if entry.endswith(".toml"))
    except OSError:
        return []


def list_all(arguments: Arguments) -> int:
    own = _own()
    rows = [(name, "built-in", BUILT_IN[name][0]) for name in BUILT_IN if name not in own]
    for name in own:
        project = load(name)
        rows.append(
            (name, "custom", str(project.get("sandbox", "base_image") or project.get("sandbox", "runtime") or "base"))
        )
    rows.sort()
    if arguments.json:
        print_json([{"name": name, "source": source, "image": image} for name, source, image in rows])
    else:
        tell(table(("NAME", "SOURCE", "IMAGE"), rows))
    return 0


def show(arguments: Arguments) -> int:
    name = arguments.rest[0]
    project = load(name)
    if project.directory:
        with open(project.path, encoding="utf-8") as file:
            tell(file.read().rstrip("\n"))
    else:
        tell(_text(name).rstrip("\n"))
    return 0


def add(arguments: Arguments) -> int:
    project = find(arguments.rest[0], "")
    assert project is not None
    name = arguments.rest[1] if len(arguments.rest) > 1 else project.get("sandbox", "name")
    if not name:
        raise InvalidArgument(f"{project.path} has no name", hint="give one after the file")
    with open(project.path, encoding="utf-8") as file:
        return _keep(str(name), file.read())


def save(arguments: Arguments) -> int:
    origin = arguments.values.get("from")
    if not origin:
        raise InvalidArgument("--from SANDBOX is needed")
    return _keep(arguments.rest[0], render(open_link(arguments).call(calls.info(reference(origin)))))


def _keep(name: str, text: str) -> int:
    sandbox_name(name)
    if name in BUILT_IN:
        raise AlreadyExists(f"{name} is a built-in template")
    os.makedirs(directory(), mode=0o700, exist_ok=True)
    path = os.path.join(directory(), name + ".toml")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)
    tell(f"Template '{name}' saved")
    return 0


def remove(arguments: Arguments) -> int:
    name = sandbox_name(arguments.rest[0])
    try:
        os.unlink(os.path.join(directory(), name + ".toml"))
    except FileNotFoundError:
        what = "is built in and stays" if name in BUILT_IN else "is not a template of yours"
        raise NotFound(f"{name} {what}", hint=nearest(name, _own()) if _own() else "") from None
    tell(f"Template '{name}' removed")
    return 0


def render(wire: SandboxWire) -> str:
    """Return the settings of a sandbox as a template file."""
    limits = {name: held["value"] for name, held in (wire.get("limits") or {}).items()}
    isolation = (wire.get("policy") or {}).get("isolation")
    mode = isolation["mode"] if isolation else None
    profile = isolation["profile"] if isolation else None
    lines = ["[sandbox]", f"name = {_quoted(wire.get('name') or 'sandbox')}"]
    if wire.get("image") and wire["image"] != "host":
        lines.append(f"base_image = {_quoted(wire['image'])}")
    if mode:
        lines += ["", "[agent]", f"compatibility_mode = {_quoted(mode)}"]
    lines += ["", "[resources]", f"vcpus = {limits.get('cpus', 1)}"]
    lines += [f"memory_mb = {limits.get('memory_mb', 512)}", "", "[security]"]
    lines.append(f"profile = {_quoted(profile or 'moderate')}")
    if isolation and isolation["network"] is False:
        lines.append("network = false")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    import json

    return json.dumps(text)
