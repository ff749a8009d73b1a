"""`atoll mcp`: MCP on stdio, or over HTTP.

On stdio this is a light process between the agent's pipes and the daemon, where the tools are. It answers `initialize` by
itself, so that an agent never waits for a start. Nothing but protocol goes to stdout. When the agent closes its end the
daemon is told by the closing socket, and ends what this client ran.
"""

from __future__ import annotations

import os
import sys

from ..client._sync.tunnel import Tunnel, upgrade
from ..client.codec import dumps, loads
from ..errors import AtollError, InvalidArgument
from ..surfaces.agentkernel.cli.words import called_agentkernel
from ..surfaces.mcp import hello
from .output import say
from .session import open_link, setting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, BinaryIO

    from ..client._sync.driver import Link
    from .grammar import Arguments

MARKS = (
    ".git",
    ".hg",
    "agentkernel.toml",
    "atoll.toml",
    ".mcp.json",
    "pyproject.toml",
    "package.json",
    "Cargo.toml",
    "go.mod",
)
LEFT_CHECK = 0.25


def serve(arguments: Arguments) -> int:
    """`mcp`, `sandbox-mcp` and, with agentkernel's tools by default, `mcp-server` and `mcp server`."""
    if arguments.rest and arguments.rest != ["server"]:
        raise InvalidArgument(f"mcp takes `server` or nothing, not {arguments.rest[0]!r:.60}")
    theirs = called_agentkernel() or arguments.verb == "mcp-server" or bool(arguments.rest)
    toolset = arguments.tools or (hello.AGENTKERNEL if theirs else hello.K8E)
    if toolset not in hello.TOOLSETS:
        raise InvalidArgument(f"no toolset {toolset!r:.60}", hint="one of " + ", ".join(hello.TOOLSETS))
    settings: dict[str, object] = {
        "toolset": toolset,
        "tenant": arguments.tenant_id or setting("TENANT") or "",
        "runtime": os.environ.get("ATOLL_RUNTIME") or "auto",
        "any_host": called_agentkernel(),
        "allow_host_access": bool(arguments.allow_host_access),
    }
    if arguments.http:
        return _http(arguments, settings)
    if toolset != hello.K8E:
        settings.update(_project())
    return Bridge(arguments, settings).run()


class Bridge:
    """Lines of stdin go to the daemon, its messages to stdout."""

    def __init__(self, arguments: Arguments, settings: Mapping[str, object]) -> None:
        import threading

        self._arguments = arguments
        self._settings = settings
        self._toolset = str(settings["toolset"])
        self._link: Link | None = None
        self._tunnel: Tunnel | None = None
        self._greeting: bytes | None = None
        self._asked: dict[Any, bool] = {}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._thread = threading.Thread

    def run(self) -> int:
        source = sys.stdin.buffer
        try:
            while line := _line(source):
                self._take(line)
            self._wait_for_answers()
        except BrokenPipeError:
            pass
        finally:
            tunnel, self._tunnel = self._tunnel, None
            if tunnel is not None:
                tunnel.close()
        os._exit(0)  # the reader may sit in a read that nothing will end

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        if len(line) > hello.MAX_LINE:
            return self._say(hello.failure(None, hello.INVALID_REQUEST, f"longer than {hello.MAX_LINE} bytes"))
        try:
            message = loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            return self._say(hello.failure(None, hello.PARSE_ERROR, "this is not JSON"))
        if isinstance(message, dict) and message.get("method") == "initialize" and message.get("id") is not None:
            params = message.get("params")
            self._say(hello.answer(message["id"], hello.initialized(params, self._toolset)))
            told = {"jsonrpc": "2.0", "method": hello.GREETED, "params": params if isinstance(params, dict) else {}}
            self._greeting = line = dumps(told).encode("ascii")
            message = told
        self._pass_on(message, line)

    def _pass_on(self, message: Any, line: bytes) -> None:
        asked = [one["id"] for one in (message if isinstance(message, list) else [message]) if _is_request(one)]
        with self._lock:
            self._asked.update(dict.fromkeys(asked, True))
        try:
            self._connected().send(line)
        except AtollError as error:
            self._lost(f"{error.message}" + (f" ({error.hint})" if error.hint else ""))

    def _connected(self) -> Tunnel:
        if self._tunnel is None:
            if self._link is None:
                self._link = open_link(self._arguments)
            self._tunnel = tunnel = upgrade(self._link, "/v1/mcp")
            tunnel.send(dumps(self._settings).encode("ascii"))
            if self._greeting is not None:
                tunnel.send(self._greeting)
            self._thread(target=self._listen, args=(tunnel,), daemon=True).start()
            return tunnel
        return self._tunnel

    def _listen(self, tunnel: Tunnel) -> None:
        reason = "the daemon has ended the connection; what was running may have run"
        rest = b""
        try:
            while data := tunnel.recv():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._deliver(line)
        except AtollError as error:
            reason = error.message
        except (BrokenPipeError, ValueError):
            os._exit(0)
        if self._tunnel is tunnel:
            self._tunnel = None
            tunnel.close()
            self._lost(reason)

    def _deliver(self, line: bytes) -> None:
        with self._lock:
            _write(line + b"\n")
            for one in _answers(line):
                self._asked.pop(one, None)
            self._idle.notify_all()

    def _lost(self, reason: str) -> None:
        """Every question that is open gets an answer."""
        with self._lock:
            asked, self._asked = list(self._asked), {}
            for request in asked:
                _write(dumps(hello.failure(request, hello.INTERNAL, reason)).encode("ascii") + b"\n")
            self._idle.notify_all()

    def _say(self, message: Mapping[str, object]) -> None:
        with self._lock:
            _write(dumps(message).encode("ascii") + b"\n")

    def _wait_for_answers(self) -> None:
        """Input has ended. Whoever still reads gets what it asked for; an agent that is gone reads no more."""
        import select

        if not hasattr(select, "poll"):  # a system on which nobody can be seen to have left
            with self._lock:
                self._idle.wait_for(lambda: not self._asked)
            return
        watch = select.poll()
        watch.register(1, 0)
        with self._lock:
            while self._asked and not any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
                self._idle.wait(LEFT_CHECK)


def _line(source: BinaryIO) -> bytes:
    """The next line; of one that is too long only so much that this can be seen."""
    line = source.readline(hello.MAX_LINE + 2)
    rest = line
    while rest and not rest.endswith(b"\n"):
        rest = source.readline(hello.MAX_LINE)
        if rest and len(line) <= hello.MAX_LINE:
            line += rest
    return line


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _is_request(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("method"), str)
        and isinstance(message.get("id"), str | int | float)
    )


def _answers(line: bytes) -> list[Any]:
    """The ids that a message of the daemon answers."""
    if b'"method"' in line[:200] and b"notifications/" in line[:200]:
        return []
    try:
        message = loads(line)
    except ValueError:
        return []
    many = message if isinstance(message, list) else [message]
    return [one["id"] for one in many if isinstance(one, dict) and isinstance(one.get("id"), str | int | float)]


def _project() -> Mapping[str, str]:
    """Return the project's choices: its file's mode and profile, and itself for the modes that show it."""
    from ..surfaces.agentkernel.cli.project import find

    here = os.path.realpath(os.getcwd())
    chosen: dict[str, str] = {}
    project = find(None, here)
    if project is not None:
        if project.mode is not None:
            chosen["mode"] = project.mode
        if project.profile is not None:
            chosen["profile"] = project.profile
    home = os.path.realpath(os.path.expanduser("~"))
    if os.path.commonpath((here, home)) != here and any(os.path.lexists(os.path.join(here, mark)) for mark in MARKS):
        chosen["project"] = here
    return chosen


def _http(arguments: Arguments, settings: Mapping[str, object]) -> int:
    """Open for as long as this process runs."""
    from .serving import open_door

    host, port = address(arguments.http_addr or setting("MCP_ADDR") or ":8811")
    fields = {**settings, "host": host, "port": port}
    for url in open_door(arguments, "/v1/mcp/http", fields):
        say(f"MCP on {url}/mcp")
    return 1


def address(text: str) -> tuple[str, int]:
    """`:8811`, `8811`, `host:8811` or `[::1]:8811`. Without a host it is loopback."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(f"{text!r:.80} is not an address", hint="such as :8811 or 127.0.0.1:8811")
    return host, int(port)
