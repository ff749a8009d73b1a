"""`atoll serve`, `atoll daemon ...` and `atoll config show`: the daemon in the foreground, and starting, stopping and seeing it."""

from __future__ import annotations

import os
import sys
import time

from ..client import calls, spawn
from ..client.codec import dumps
from ..client.portable import require_linux
from ..errors import DaemonUnreachable, FailedPrecondition, Timeout
from .output import OWN_FAILURE, print_json, say, tell
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .grammar import Arguments

STOP_DEADLINE = 120.0
SANDBOX_ID = 20  # letters of an id


def serve(arguments: Arguments) -> int:
    """Become the daemon."""
    require_linux()
    if arguments.agentkernel or os.path.basename(sys.argv[0]) == "agentkernel":
        from ..surfaces.agentkernel.cli.serve import serve as serve_agentkernel

        return serve_agentkernel(arguments)
    if arguments.e2b is not None:
        from ..surfaces.e2b.cli.serve import serve as serve_e2b

        return serve_e2b(arguments)
    home = spawn.home_directory()
    os.makedirs(home, mode=0o711, exist_ok=True)
    if os.environ.get("LISTEN_PID") != str(os.getpid()) and spawn.reachable(
        home
    ):  # else the socket is systemd's, for us
        _replace_daemon(arguments, home)
    say(f"serving {spawn.socket_path(home)}; messages go to {home}/daemon.log")
    addresses = [] if arguments.grpc == ["none"] else arguments.grpc or ["default"]
    listeners = [word for address in addresses for word in ("--grpc", address)]
    os.execv(sys.executable, [sys.executable, *spawn.daemon_arguments(home), *listeners])


def _replace_daemon(arguments: Arguments, home: str) -> None:
    """Stop a daemon that was started on demand and has no sandbox, so that this one can take its place."""
    link = open_link(arguments, start=False)
    health = link.call(calls.get("/v1/health"))
    pid, sandboxes = health.get("pid"), health.get("sandboxes")
    if health.get("pinned") or sandboxes:
        held = f" with {sandboxes} sandboxes" if sandboxes else ""
        raise FailedPrecondition(
            f"a daemon (pid {pid}) serves {home} already{held}",
            hint="atoll daemon stop; atoll serve (sandboxes go on meanwhile)",
        )
    say(f"taking over from the daemon that was started on demand (pid {pid})")
    link.call(calls.post("/v1/daemon/stop", {"force": False}))
    link.close()
    _wait_until_gone(pid, home)


def start(arguments: Arguments) -> int:
    link = open_link(arguments)
    link.call(calls.post("/v1/daemon/pin", {}, repeatable=True))
    health = link.call(calls.get("/v1/health"))
    tell(f"Daemon: running (pid {health.get('pid')})")
    return 0


def prewarm(arguments: Arguments) -> int:
    """Pin the daemon and wait until its pool is as full as it wants to be."""
    link = open_link(arguments)
    asked = {"mode": arguments.mode, "count": arguments.count or 0}
    link.call(calls.post("/v1/daemon/pin", asked, repeatable=True))
    until = time.monotonic() + STOP_DEADLINE
    while True:
        pool = link.call(calls.get("/v1/health"))["pool"]
        wanted = sum(kind["wanted"] for kind in pool["kinds"])
        if pool["kinds"] and all(kind["ready"] >= kind["wanted"] for kind in pool["kinds"]):
            break
        if not pool["kinds"] and not any(one["works"] for one in link.call(calls.get("/v1/runtimes"))["runtimes"]):
            raise FailedPrecondition("no runtime works here, so nothing can be kept warm", hint="atoll doctor")
        if time.monotonic() > until or (not pool["enabled"] and pool["kinds"]):
            raise Timeout(
                f"only {pool['ready']} of {wanted} warm sandboxes are ready", hint=f"see {link.home}/daemon.log"
            )
        time.sleep(0.05)
    tell(f"Pool: {pool['ready']} warm sandboxes")
    return 0


def stop(arguments: Arguments) -> int:
    link = open_link(arguments, start=False)
    try:
        pid = link.call(calls.get("/v1/health")).get("pid")
    except DaemonUnreachable:
        if not arguments.force or not _something_runs(link.home):
            say("atoll: the daemon is not running")
            return OWN_FAILURE
        say("atoll: the daemon is not running, its sandboxes are; one is started that ends them")
        link = open_link(arguments)  # with a damaged store it ends them and says so as it fails
        pid = link.call(calls.get("/v1/health")).get("pid")
    answer = link.call(calls.post("/v1/daemon/stop", {"force": bool(arguments.force)}))
    link.close()
    _wait_until_gone(pid, link.home)
    if late := answer.get("unrecorded"):
        say(f"atoll: ended, and could not be recorded: {', '.join(late)}")
    if not arguments.force and answer.get("sandboxes"):
        say(f"atoll: {answer['sandboxes']} sandboxes go on")
    tell("Daemon: stopped")
    return 0


def _something_runs(home: str) -> bool:
    """Tell whether a daemon that is gone left sandboxes: each has a directory while it runs."""
    try:
        return any(len(name) == SANDBOX_ID for name in os.listdir(os.path.join(home, "run")))
    except OSError:
        return False


def _wait_until_gone(pid: object, home: str) -> None:
    until = time.monotonic() + STOP_DEADLINE
    # A socket that can be connected to says nothing where systemd holds it: to connect would start the next daemon.
    while _is_there(pid) if pid else spawn.reachable(home):
        if time.monotonic() > until:
            raise Timeout(f"the daemon (pid {pid}) has not ended yet", hint=f"see {home}/daemon.log")
        time.sleep(0.02)


def _is_there(pid: object) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def status(arguments: Arguments) -> int:
    link = open_link(arguments, start=False)
    try:
        health: dict[str, Any] = {"running": True, **link.call(calls.get("/v1/health"))}
    except DaemonUnreachable:
        health = {"running": False, "pid": None, "home": link.home}
    health["socket"] = link.path
    if arguments.json:
        print_json(health)
        return 0
    tell("Daemon: running" if health["running"] else "Daemon: not running")
    tell(f"Socket: {link.path}")
    if health["running"]:
        tell(f"Pid: {health.get('pid')}")
        tell(f"Version: {health.get('version')}")
        tell(f"Sandboxes: {health.get('sandboxes')}")
        pool = health["pool"]
        tell(f"Pool: {pool['ready']} warm, {pool['hits']} hits, {pool['misses']} misses")
        tell(f"  of each kind: {pool['floor']} to {pool['ceiling']}")
        for kind in pool["kinds"]:
            tell(f"  {kind['runtime']}: {kind['ready']} of {kind['wanted']} warm")
        for agent, ready in pool.get("agents", {}).items():
            tell(f"  for {agent}: {ready} warm")
    return 0


def show_config(arguments: Arguments) -> int:
    """As config.toml would say it; what is not there has its default."""
    link = open_link(arguments)
    settings = link.call(calls.get("/v1/config"))
    if settings["sandboxes"]["hosts"] is None:
        settings["sandboxes"]["hosts"] = link.call(calls.get("/v1/policy/hosts", {"of": "default"}))["hosts"]
    if arguments.json:
        print_json(settings)
        return 0
    for table, values in settings.items():
        tell(f"[{table}]")
        for key, value in values.items():
            tell(f"{key} = {_toml(value)}")
    return 0


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dumps(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return dumps(value)
