"""Named sandboxes that last: create, start, stop, remove, list, info, and the housekeeping around them.

In the `sandbox` group of atoll these speak JSON like its other verbs; as flat verbs, and under the name agentkernel, text.
"""

from __future__ import annotations

import os
import time

from atoll.cli.output import print_json, say, tell, write
from atoll.cli.progress import create_watched
from atoll.cli.sandbox import more_options
from atoll.cli.session import create_options, open_link, reference, shown
from atoll.client import calls
from atoll.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported

from .policy import choose_image, create_fields
from .project import find
from .run import template_project
from .words import called_agentkernel, duration, sandbox_name, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from atoll.cli.grammar import Arguments
    from atoll.client._sync.driver import Link
    from atoll.client.wire import MountFields, SandboxFields, SandboxWire

    from .project import Project

SHOWN = {"running": "running", "paused": "paused", "stopped": "stopped", "creating": "starting"}


def speaks_json(arguments: Arguments) -> bool:
    grouped = arguments.verb.startswith("sandbox ") and not called_agentkernel() and not os.isatty(1)
    return bool(grouped or arguments.values.get("json"))


def create(arguments: Arguments) -> int:
    name = sandbox_name(arguments.rest[0])
    project = template_project(arguments) or find(arguments.config, os.getcwd())
    if project is not None:
        _refuse_unused(project)
    link = open_link(arguments)
    fields = _fields(arguments, project, name, link)
    try:
        made = create_watched(link, calls.create(fields))
    except AlreadyExists:
        if not arguments.branch:
            raise
        made = link.call(calls.info(name))
    answer = {**_row(made), "vcpus": _limit(made, "cpus"), "memory_mb": _limit(made, "memory_mb")}
    if speaks_json(arguments):
        print_json({"session_id": "sess-" + made["id"], **answer})
        return 0
    program = "agentkernel" if called_agentkernel() else "atoll"
    tell(f"Sandbox '{name}' created")
    tell(f"  Image:  {answer['image']}\n  vCPUs:  {answer['vcpus']}\n  Memory: {answer['memory_mb']} MB")
    tell(f"Next: {program} sandbox start {name}")
    return 0


def _refuse_unused(project: Project) -> None:
    """Refuse options that need a started sandbox and so have a meaning for a run alone."""
    unused = {"files": project.data.get("files"), "ports": project.ports}
    hints = {"files": "use `atoll cp` once it is started", "ports": "use `atoll sandbox expose` once it is started"}
    for word in [word for word, value in unused.items() if value]:
        if not project.found:
            raise Unsupported(
                f"{project.path}: `{word}` is for `run`, not for a sandbox made by `create`", hint=hints[word]
            )
        say(f"Warning: {project.path}: `{word}` is for `run`; {hints[word]}")


def _fields(arguments: Arguments, project: Project | None, name: str, link: Link) -> SandboxFields:
    fields = create_fields(arguments, project, link)
    image, program = choose_image(arguments, project, [], link)
    fields |= {"name": name, "image": image, "program": program, "start": False, "persistent": True}
    if called_agentkernel() and "mode" not in fields and "hosts" not in fields:
        fields["mode"] = "native"
    if arguments.ttl is not None:
        fields["lifetime_s"] = duration(arguments.ttl, "ttl")
    if arguments.dir is not None:
        others = [mount for mount in fields.get("mounts") or [] if mount["target"] != "/workspace"]
        fields["mounts"] = [*others, workspace_mount(arguments.dir)]
    labels = {"project": os.getcwd()}
    if arguments.agent:
        labels["agent"] = arguments.agent
    if arguments.verb == "sandbox create":  # it has the flags of K8E's create too
        more = calls.create_fields({**create_options(arguments), **more_options(arguments)})
        labels.update(more.pop("labels", None) or {})
        fields["limits"] = {**(more.pop("limits", {}) or {}), **(fields.get("limits") or {})}
        chosen = (
            *(("runtime",) if arguments.runtime else ()),
            "lifetime_s",
            "idle_timeout_s",
            "host_ports",
            *more_options(arguments),
        )
        fields.update({key: value for key, value in more.items() if key in chosen})  # type: ignore[typeddict-item]
    fields["labels"] = labels
    return fields


def workspace_mount(directory: str) -> MountFields:
    """A directory of this machine as /workspace."""
    source = os.path.realpath(directory)
    if not os.path.isdir(source):
        raise InvalidArgument(f"{directory} is not a directory")
    return {"source": source, "target": "/workspace", "read_only": False}


def start(arguments: Arguments) -> int:
    return _change(arguments, "start", "started")


def stop(arguments: Arguments) -> int:
    return _change(arguments, "stop", "stopped")


def pause(arguments: Arguments) -> int:
    return _change(arguments, "pause", "paused")


def resume(arguments: Arguments) -> int:
    return _change(arguments, "resume", "resumed")


def _change(arguments: Arguments, verb: str, done: str) -> int:
    name = arguments.rest[0]
    made = open_link(arguments).call(calls.lifecycle(reference(name), verb))
    if speaks_json(arguments):
        print_json({"ok": True, **_row(made)})
    else:
        tell(f"Sandbox '{name}' {done}")
    return 0


def remove(arguments: Arguments) -> int:
    """Remove each of them. One that does not exist is an error unless --force, or the name agentkernel, says otherwise."""
    link, found, missing = open_link(arguments), [], []
    for name in arguments.rest:
        try:
            link.call(calls.destroy(reference(name)))
            found.append(name)
        except NotFound:
            missing.append(name)
        if not speaks_json(arguments):
            gone = name in found
            tell(f"Sandbox '{name}' removed" if gone else f"Sandbox '{name}' does not exist; nothing to remove")
    lenient = bool(arguments.force) or called_agentkernel()
    if missing and not lenient:
        raise NotFound(
            f"no sandbox {', '.join(map(repr, missing))}", hint="--force takes one that does not exist as removed"
        )
    if speaks_json(arguments):
        one = {"name": arguments.rest[0], "removed": bool(found)} if len(arguments.rest) == 1 else {}
        print_json({"ok": True, **one, "removed_names": found, "missing": missing})
    return 0


def list_all(arguments: Arguments) -> int:
    """agentkernel's list; under every other name it is the one list of `sandbox list`."""
    if not called_agentkernel():
        from atoll.cli.sandbox import list_sandboxes

        return list_sandboxes(arguments)
    found = open_link(arguments).call(calls.list_sandboxes("active"))["sandboxes"]
    if arguments.values.get("project"):
        found = [item for item in found if (item.get("labels") or {}).get("project") == os.getcwd()]
    rows = sorted((_row(item) for item in found if item.get("state") in SHOWN), key=lambda row: row["name"])
    if speaks_json(arguments):
        print_json(rows)
    elif rows:
        tell(table(("NAME", "STATUS", "BACKEND"), [(row["name"], row["status"], row["backend"]) for row in rows]))
    else:
        tell("No sandboxes. Make one: atoll sandbox create NAME")
    return 0


def info(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.info(reference(arguments.rest[0])))
    if speaks_json(arguments):
        print_json(wire)
        return 0
    isolation = (wire.get("policy") or {}).get("isolation") or {}
    hosts = wire.get("hosts")
    lines = {
        "Name": wire.get("name") or wire["id"],
        "Id": shown(wire["id"], wire.get("parent_id"), wire.get("labels")),
        "Status": SHOWN.get(wire["state"], wire["state"]),
        "Backend": wire["runtime"],
        "Image": wire["image"],
        "vCPUs": _limit(wire, "cpus"),
        "Memory": f"{_limit(wire, 'memory_mb')} MB",
        "Profile": isolation.get("profile"),
        "Mode": isolation.get("mode") or "-",
        "Network": "off" if isolation.get("network") is False else ", ".join(hosts) if hosts else "default hosts",
        "Created": _when(wire.get("created_at")),
        "Expires": _when(wire.get("expires_at")),
    }
    tell("\n".join(f"{key + ':':<10}{value}" for key, value in lines.items()))
    return 0


def extend(arguments: Arguments) -> int:
    by = duration(arguments.by, "by")
    made = open_link(arguments).call(
        calls.Call(
            "POST", calls.sandbox_path(reference(arguments.rest[0]), "extend"),
            b'{"lifetime_s":null}' if by is None else b'{"lifetime_s":%f}' % by,
            (("Content-Type", "application/json"),),
        )
    )  # fmt: skip
    if speaks_json(arguments):
        print_json({"name": made.get("name"), "expires_at": made.get("expires_at")})
    else:
        tell(f"Expires: {_when(made.get('expires_at'))}")
    return 0


def collect(arguments: Arguments) -> int:
    """The daemon does this by itself; here it is done at once."""
    now = time.time()
    return _remove_some(arguments, lambda item: bool(item.get("expires_at")) and item["expires_at"] <= now)


def clean(arguments: Arguments) -> int:
    return _remove_some(arguments, lambda item: bool(arguments.all) or item.get("state") == "stopped")


def _remove_some(arguments: Arguments, wanted: Any) -> int:
    link = open_link(arguments)
    removed = []
    for item in link.call(calls.list_sandboxes("active"))["sandboxes"]:
        if wanted(item):
            try:
                link.call(calls.destroy(item["id"]))
            except NotFound:
                continue
            removed.append(item.get("name") or item["id"])
    if speaks_json(arguments):
        print_json({"removed": removed})
    else:
        tell(f"Removed {len(removed)}" + (": " + ", ".join(removed) if removed else ""))
    return 0


def export(arguments: Arguments) -> int:
    """A tar of the file system, to a file or, with `-`, to standard output."""
    name = arguments.rest[0]
    target = arguments.output or f"{name}.tar"
    exchange = open_link(arguments).open(calls.tar(reference(name), arguments.path or "/", upload=False))
    exchange.raise_for_status()
    pieces = iter(exchange.read, b"")
    if target == "-":
        for piece in pieces:
            write(1, piece)
        return 0
    count = 0
    with open(target + ".part", "wb") as file:
        for piece in pieces:
            count += file.write(piece)
    os.replace(target + ".part", target)
    say(f"Exported {count} bytes to {target}")
    return 0


def export_config(arguments: Arguments) -> int:
    from .templates import render

    tell(render(open_link(arguments).call(calls.info(reference(arguments.rest[0])))).rstrip("\n"))
    return 0


def import_config(arguments: Arguments) -> int:
    """Like create, from a file that a person names."""
    project = find(arguments.rest[0], os.getcwd())
    assert project is not None
    name = arguments.values.get("as") or project.get("sandbox", "name")
    if not name:
        raise InvalidArgument(f"{project.path} names no sandbox", hint="give one with --as")
    from atoll.cli.agentkernel_verbs import CREATE

    values = {flag.key: [] if flag.repeat else flag.default for flag in CREATE}
    values.update(endpoint=arguments.endpoint, config=arguments.rest[0])
    return create(type(arguments)([name], values, arguments.verb))


def _row(wire: SandboxWire) -> dict[str, str]:
    return {
        "name": wire.get("name") or wire["id"],
        "status": SHOWN.get(wire["state"], wire["state"]),
        "backend": wire["runtime"],
        "image": wire["image"],
    }


def _limit(wire: SandboxWire, name: str) -> float | None:
    held = (wire.get("limits") or {}).get(name)
    return None if held is None else held["value"]


def _when(at: float | None) -> str:
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
