"""The other `sandbox` verbs, in K8E's grammar and JSON: thin, each one request and its answer in K8E's words."""

from __future__ import annotations

import os
import sys
import time

from ..client import calls
from ..client.results import CommandInfo, FileInfo, Output
from ..errors import AtollError, FailedPrecondition, InvalidArgument, NotFound
from ..words import k8e as words
from .output import UNREACHABLE, for_people, print_json, safe_bytes, write
from .session import (
    create_options,
    data_directory,
    endpoint_of,
    find_own,
    open_link,
    reference,
    run_id,
    setting,
    shown,
    split_run_id,
    state_of,
    tell_unheld,
    tenant_of,
)
from .state import forget_everywhere
from .volumes import read_volumes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..client._sync.driver import Link
    from ..client.options import CreateOptions
    from ..client.wire import CommandWire, SandboxWire
    from .grammar import Arguments

WINDOW = 262_144


def create(arguments: Arguments) -> int:
    if arguments.rest:
        _refuse(arguments, _FOR_STARTED, "is for a sandbox that starts at once", "use --name NAME in place of NAME")
        from ..surfaces.agentkernel.cli.named import create as create_named

        return create_named(arguments)
    _refuse(arguments, _FOR_NAMED, "is for a sandbox to start later", "put its NAME after `create`")
    name = arguments.name
    options: CreateOptions = {**create_options(arguments), **_agentkernel_words(arguments), **more_options(arguments)}
    options["name"], options["env"] = name, dict(arguments.env) or None
    count, link = 0, open_link(arguments)
    if arguments.manifest or arguments.git_repo:
        from .workspaces import create_filled

        wire, count = create_filled(link, arguments, options)
    else:
        from .progress import create_watched

        wire = create_watched(link, calls.create(options))
    tell_unheld(wire)
    found = {
        "session_id": arguments.session_id or shown(wire["id"]),
        "pod_ip": "",
        "entries_materialized": count,
        "runtime_class": wire.get("runtime"),
        "image": wire.get("image"),
    }
    if name:
        found["name"] = name
    print_json(found)
    return 0


_FOR_STARTED = ("name", "manifest", "git_repo", "git_ref", "git_path")
_FOR_NAMED = ("agent", "config", "template", "branch")


def _refuse(arguments: Arguments, names: tuple[str, ...], why: str, hint: str) -> None:
    """A flag that would be ignored is an error."""
    for name in names:
        if arguments.values.get(name):
            raise InvalidArgument(f"--{name.replace('_', '-')} {why}", hint=hint)


def _agentkernel_words(arguments: Arguments) -> CreateOptions:
    """Flags that agentkernel's create has under names of its own."""
    found: CreateOptions = {}
    if arguments.dir is not None:
        from ..surfaces.agentkernel.cli.named import workspace_mount

        found["mounts"] = [workspace_mount(arguments.dir)]
    if arguments.backend is not None:
        from ..surfaces.agentkernel.cli.words import runtime

        found["runtime"] = arguments.runtime or runtime(arguments.backend)
    if arguments.ttl is not None:
        from ..surfaces.agentkernel.cli.words import duration

        found["lifetime"] = duration(arguments.ttl, "ttl")
    if arguments.compatibility_mode is not None:
        found["mode"] = arguments.compatibility_mode
    return found


def more_options(arguments: Arguments) -> CreateOptions:
    """Return the options that only `sandbox create` has, with and without a NAME, as the SDK's create takes them."""
    labels = dict(arguments.label)
    if arguments.tenant or setting("TENANT"):
        labels.update(words.tenant_labels(tenant_of(arguments)))
    if arguments.session_id:
        labels[words.SESSION_LABEL] = arguments.session_id
    found: Mapping[str, object] = {
        "alias": arguments.session_id,
        "workdir": arguments.workdir,
        "read_only_root": arguments.read_only_root,
        "persistent": arguments.persistent,
        "volumes": read_volumes(arguments.volume),
        "secrets": [_secret(env, ref) for env, ref in arguments.secret],
        "require_approval": arguments.require_approval,
        "labels": labels,
    }
    return {key: value for key, value in found.items() if value}  # type: ignore[return-value]


def _secret(env: str, ref: str) -> dict[str, str]:
    name, colon, key = ref.partition(":")
    if not (colon and name and key):
        raise InvalidArgument(f"--secret needs VAR=NAME:KEY, not {env}={ref}")
    return {"env": env, "name": name, "key": key}


def get(arguments: Arguments) -> int:
    found = _session(open_link(arguments).call(calls.info(_ref(arguments))))
    if not _shown_to_people("show_session", found, arguments):
        print_json(found)
    return 0


def list_any(arguments: Arguments) -> int:
    """Without an id the sandboxes, with one its files."""
    if os.path.basename(sys.argv[0]) == "agentkernel" and not arguments.rest:
        from ..surfaces.agentkernel.cli.named import list_all

        return list_all(arguments)
    if arguments.rest:
        return _list_files(arguments)
    return list_sandboxes(arguments)


def list_sandboxes(arguments: Arguments) -> int:
    """The one list: a table for people and for text verbs, JSON for programs."""
    state = "all" if arguments.values.get("all") else "active"
    rows = open_link(arguments).call(calls.list_sandboxes(state))["sandboxes"]
    if arguments.values.get("project"):
        rows = [row for row in rows if (row.get("labels") or {}).get("project") == os.getcwd()]
    found = [_session(row) for row in rows]
    if arguments.verb == "list" and not arguments.values.get("json"):
        from .views import show_sessions

        show_sessions(found)
    elif not _shown_to_people("show_sessions", found, arguments):
        print_json({"sandboxes": found})
    return 0


def _list_files(arguments: Arguments) -> int:
    fields = {
        "path": "/workspace", "recursive": True, "files_only": True, "since": arguments.since or None,
        "user": arguments.user,
    }  # fmt: skip
    call = calls.file_operation(_ref(arguments), "list", fields, repeatable=True)
    wire = open_link(arguments).call(call)
    files = []
    for item in wire["entries"]:
        entry = FileInfo(item)
        path = entry.path if entry.path.startswith("/") else f"/workspace/{entry.path}"
        files.append({"path": path, "modified": int(entry.mtime), "type": entry.type, "size": entry.size})
    found: dict[str, object] = {"files": files}
    if wire.get("truncated"):
        found["truncated"] = True
    if not _shown_to_people("show_files", files, arguments):
        print_json(found)
    return 0


def sessions(arguments: Arguments) -> int:
    wanted = arguments.phase
    wire = open_link(arguments).call(calls.list_sandboxes("active" if wanted == "Active" else "all"))
    found = [item for item in map(_session, wire["sandboxes"]) if wanted in ("all", item["phase"])]
    if not _shown_to_people("show_sessions", found, arguments):
        print_json({"sessions": found})
    return 0


def destroy(arguments: Arguments) -> int:
    data, where = data_directory(), endpoint_of(arguments)
    if arguments.rest:
        session = arguments.rest[0]
    else:
        tenant = tenant_of(arguments)
        link = open_link(arguments)
        session = state_of(arguments, tenant).current() or find_own(link, state_of(arguments, tenant)) or ""
        if not session:
            raise InvalidArgument("destroy needs an ID: this tenant has no sandbox of its own")
    try:
        wire = open_link(arguments).call(calls.destroy(reference(session)))
        forget_everywhere(data, shown(str(wire.get("id") or "")), where)
    except NotFound:
        forget_everywhere(data, session, where)
        raise
    forget_everywhere(data, session, where)
    print_json({"ok": True})
    return 0


def write_file(arguments: Arguments) -> int:
    if arguments.mode not in ("w", "a"):
        raise InvalidArgument("--mode is w or a")
    path = arguments.rest[1]
    append = arguments.mode == "a"
    call = calls.write_file(_ref(arguments), path, None, append=append, parents=True, user=arguments.user)
    wire = open_link(arguments).open(call, iter(lambda: os.read(0, WINDOW), b"")).json()
    print_json({"ok": True, "path": path, "bytes": wire.get("bytes")})
    return 0


def read(arguments: Arguments) -> int:
    path = arguments.rest[1]
    exchange = open_link(arguments).open(calls.read_file(_ref(arguments), path, user=arguments.user))
    exchange.raise_for_status()
    if arguments.raw:
        while piece := exchange.read():
            write(1, piece)
        return 0
    data = exchange.body()
    if for_people():
        write(1, safe_bytes(data))
        return 0
    try:
        print_json({"content": data.decode("utf-8"), "path": path})
    except UnicodeDecodeError:
        from ..client.codec import to_base64

        print_json({"content_b64": to_base64(data), "path": path, "encoding": "base64"})
    return 0


def status(arguments: Arguments) -> int:
    tenant = tenant_of(arguments)
    found: dict[str, object] = {"available": False, "session_id": "", "tenant_id": tenant, "error": ""}
    session = state_of(arguments, tenant).current()
    try:
        link = open_link(arguments)
        health = link.call(calls.get("/v1/health"))
        found.update(available=bool(health.get("ok", True)), version=health.get("version"))
        session = session or find_own(link, state_of(arguments, tenant))
        if session:
            link.call(calls.info(reference(session)))
            found["session_id"] = session
    except NotFound:
        pass
    except AtollError as error:
        found["error"] = error.message
        print_json(found)
        return UNREACHABLE
    print_json(found)
    return 0


def ps(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.get(calls.sandbox_path(_ref(arguments), "processes")))
    print_json({"processes": wire["processes"]})
    return 0


def log(arguments: Arguments) -> int:
    """The transcript as text; what could steer a terminal is escaped unless --raw."""
    link, target = open_link(arguments), calls.sandbox_path(_ref(arguments), "log")
    offset, left = arguments.offset, arguments.limit or None
    while True:
        wire = link.call(calls.get(target, {"offset": offset, "limit": left}))
        data = str(wire.get("output") or "").encode("utf-8", "surrogateescape")
        write(1, data if arguments.raw else safe_bytes(data))
        moved, offset = wire.get("next_offset", offset) > offset, wire.get("next_offset", offset)
        if not arguments.follow and (left is not None or wire.get("eof", True) or not moved):
            return 0
        if not moved:
            if link.call(calls.info(_ref(arguments))).get("state") == "ended":
                return 0
            time.sleep(0.3)


def events(arguments: Arguments) -> int:
    link = open_link(arguments)
    if arguments.rest:
        wire = link.call(calls.get(calls.sandbox_path(_ref(arguments), "events"), {"limit": arguments.limit}))
        found, truncated = wire["events"], bool(wire.get("truncated"))
    else:
        found, truncated = [], False
        for item in link.call(calls.list_sandboxes("all"))["sandboxes"]:
            wire = link.call(calls.get(calls.sandbox_path(item["id"], "events"), {"limit": arguments.limit}))
            found += wire["events"]
        found.sort(key=lambda event: event.get("seq") or 0)
        truncated = len(found) > arguments.limit
        found = found[-arguments.limit :]
    if not _shown_to_people("show_events", found, arguments):
        print_json({"events": found, "returned": len(found), "truncated": truncated})
    return 0


def poll(arguments: Arguments) -> int:
    ref, command = split_run_id(arguments.rest[0])
    link = open_link(arguments)
    wire = link.call(calls.poll(ref, command))
    if arguments.follow:
        wire = _follow(link, ref, command, arguments)
    found = CommandInfo(wire)
    if arguments.raw or (arguments.follow and for_people()):
        return -1 & 255 if found.exit_code is None else found.exit_code & 255
    running = found.running
    answer = {
        "run_id": run_id(found.sandbox_id or ref, command),
        "status": "failed" if found.status == "lost" else found.status,
        "stdout": found.stdout,
        "stderr": found.stderr,
        "exit_code": -1 if running or found.timed_out or found.exit_code is None else found.exit_code,
        "duration_ms": wire.get("duration_ms") or 0,
        "truncated": found.truncated,
    }
    for name in ("stdout_b64", "stderr_b64"):
        if wire.get(name):
            answer[name] = wire[name]
    print_json(answer)
    return 0


def _follow(link: Link, ref: str, command: str, arguments: Arguments) -> CommandWire:
    """Pass a command's output on while it runs; return how it stands in the end.

    It goes where the command wrote it, at a terminal and with --raw. Else all of it goes to stderr, because standard output
    has the one JSON object of the end.
    """
    apart = arguments.raw or os.isatty(1)
    try:
        for value in link.open(calls.attach(ref, command)).frames():
            if isinstance(value, Output):
                descriptor = 1 if apart and value.stream == "stdout" else 2
                write(descriptor, value.data if arguments.raw or not os.isatty(descriptor) else safe_bytes(value.data))
    except FailedPrecondition:
        pass  # it ended long ago; what is left of its output is in the answer
    found: CommandWire = link.call(calls.poll(ref, command))
    return found


def _ref(arguments: Arguments) -> str:
    return reference(arguments.rest[0])


def _shown_to_people(how: str, what: Any, arguments: Arguments) -> bool:
    """On a terminal without --json: a table instead. False when JSON is to be printed."""
    if arguments.values.get("json") or not os.isatty(1):
        return False
    from . import views

    getattr(views, how)(what)
    return True


def _session(wire: SandboxWire) -> Mapping[str, object]:
    """A sandbox in K8E's words; atoll's own fields follow."""
    found: dict[str, object] = {
        "session_id": shown(wire["id"], wire.get("parent_id"), wire.get("labels")),
        "phase": words.phase_of(wire.get("state")),
        "runtime_class": wire.get("runtime"),
        "pod_ip": "",
        "tenant_id": words.tenant_of(wire.get("labels")),
        "expires_at": int(wire.get("expires_at") or 0),
        "env_keys": wire.get("env_keys") or [],
        "secret_env_vars": wire.get("secret_env_vars") or [],
        "background_runs": wire.get("background_runs") or 0,
        "allowed_hosts": wire.get("hosts"),
    }
    for name in ("name", "image", "state", "created_at", "idle_timeout_s", "last_active", "limits", "policy", "end",
                 "require_approval"):  # fmt: skip
        if wire.get(name) is not None:
            found[name] = wire[name]
    return found
