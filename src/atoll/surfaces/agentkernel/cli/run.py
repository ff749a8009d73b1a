"""`atoll run CMD...`: a command in a fresh sandbox of its own, its output as it comes, its exit status as ours."""

from __future__ import annotations

import os

from atoll.cli.execute import Interrupts, beside, exit_code, feed_stdin
from atoll.cli.output import OWN_FAILURE, program_name, safe_bytes, say, write
from atoll.cli.progress import Shown
from atoll.cli.session import open_link
from atoll.client.calls import Call, milliseconds, new_command_id
from atoll.client.codec import dumps
from atoll.client.http import FRAMES
from atoll.client.results import Event, ExecResult, Output, Started

from .policy import choose_image, create_fields
from .project import find
from .words import called_agentkernel, duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NotRequired, TypedDict

    from atoll.cli.grammar import Arguments
    from atoll.client._sync.driver import Link
    from atoll.client.wire import CommandWire, SandboxFields

    class CommandFields(TypedDict):
        id: str
        argv: list[str]
        timeout_ms: int
        output_limit: int
        stdin_stream: bool

    class Request(TypedDict):
        """A sandbox for one command."""

        sandbox: SandboxFields
        command: CommandFields
        keep: bool
        any_host: bool
        files: NotRequired[list[Mapping[str, object]]]

    class Made(TypedDict, total=False):
        """The sandbox of a run, as it is told."""

        id: str
        name: str
        image: str
        unheld: list[str]

    from .project import Project
    from .publish import Published

TALKATIVE = ("sh", "bash", "zsh", "python", "python3", "node", "irb", "psql", "sqlite3")  # alone, they ask and listen
_NULL_DEVICE = os.makedev(1, 3)
_HEADERS = (("Content-Type", "application/json"), ("Accept", FRAMES))


def run(arguments: Arguments) -> int:
    argv: list[str] = arguments.rest
    project = template_project(arguments) or find(arguments.config, os.getcwd())
    if project is not None:
        project.check_command(argv)
    if os.isatty(0) and len(argv) == 1 and os.path.basename(argv[0]) in TALKATIVE:
        say(
            f"hint: run has no terminal, so {argv[0]} reads nothing; for that: atoll sandbox create --name x, atoll attach x"
        )
    link = open_link(arguments)
    published = _publish(arguments, project, link)
    request = _request(arguments, project, argv, link)
    call = Call("POST", "/v1/run", dumps(request).encode("ascii"), _HEADERS, timeout=None)
    call.command_id = request["command"]["id"]
    shown = Shown()
    interrupts = Interrupts(link, str(call.command_id))
    try:
        mounted = bool(request["sandbox"].get("mounts"))
        return _follow(link, call, arguments, argv, shown, published, mounted=mounted, interrupts=interrupts)
    finally:
        interrupts.end()
        shown.close()


def template_project(arguments: Arguments) -> Project | None:
    """A template stands in for a project's file that was named."""
    if not arguments.template:
        return None
    from .templates import load

    return load(arguments.template)


def _request(arguments: Arguments, project: Project | None, argv: list[str], link: Link) -> Request:
    timeout = None if arguments.timeout is None else duration(arguments.timeout, "timeout")
    fields = create_fields(arguments, project, link)
    image, program = choose_image(arguments, project, argv, link)
    fields["image"] = image
    if program is not None:
        fields["program"] = program
    if arguments.ttl is not None:
        fields["lifetime_s"] = duration(arguments.ttl, "ttl") or 10.0 * 365 * 86400
    command: CommandFields = {
        "id": new_command_id(),
        "argv": argv,
        "timeout_ms": milliseconds(timeout),
        "output_limit": 65_536,
        "stdin_stream": _has_input(),
    }
    request: Request = {
        "sandbox": fields,
        "command": command,
        "keep": bool(arguments.keep),
        "any_host": called_agentkernel(),
    }
    if project is not None and project.data.get("files"):
        request["files"] = project.files()
    return request


def _has_input() -> bool:
    """Whether anything can come from our standard input: it is neither a terminal, nor /dev/null, nor closed."""
    try:
        return not os.isatty(0) and os.fstat(0).st_rdev != _NULL_DEVICE
    except OSError:
        return False


def _publish(arguments: Arguments, project: Project | None, link: Link) -> Published | None:
    """The flags', and the ports of a file that a person named."""
    ports = [*(project.ports if project is not None else ()), *arguments.publish]
    if not ports:
        return None
    from .publish import Published

    return Published(link, ports)


def _follow(
    link: Link,
    call: Call,
    arguments: Arguments,
    argv: list[str],
    shown: Shown,
    published: Published | None,
    mounted: bool,
    interrupts: Interrupts,
) -> int:
    sandbox: Made = {}
    escaped = [not arguments.raw and os.isatty(descriptor) for descriptor in (1, 2)]
    exchange = link.open(call)
    exchange.raise_for_status()
    for value in exchange.frames():
        if isinstance(value, Started):
            interrupts.begin(sandbox["id"])
        if isinstance(value, Output):
            descriptor = 1 if value.stream == "stdout" else 2
            write(descriptor, safe_bytes(value.data) if escaped[descriptor - 1] else value.data)
        elif isinstance(value, Event) and "progress" in value.data:
            shown.show(value.data["progress"])
        elif isinstance(value, Event):
            shown.close()
            sandbox = value.data.get("sandbox") or sandbox
            if published is not None and sandbox:
                published.open(sandbox["id"])
                published = None
            if unheld := sandbox.get("unheld"):
                from atoll.cli.unheld import note_unheld

                note_unheld(unheld)
        elif isinstance(value, Started):
            if _has_input():
                feed_stdin(beside(link), sandbox["id"], str(call.command_id))
        elif isinstance(value, dict):
            if arguments.keep:
                _tell_kept(str(sandbox.get("name")))
            if value.get("blocked"):
                from atoll.cli.network import note_blocked

                note_blocked(value, str(sandbox.get("id", "")), f"{program_name()} run --allow-host {{name}} ...")
            return _status(value, argv, sandbox, mounted)
    return OWN_FAILURE


def _tell_kept(name: str) -> None:
    program = "agentkernel" if called_agentkernel() else "atoll"
    say(
        f"Sandbox {name} is kept running. Enter it: {program} attach {name}   Remove it: {program} sandbox remove {name}"
    )


def _status(wire: CommandWire, argv: list[str], sandbox: Made, mounted: bool) -> int:
    code = exit_code(wire)
    result = ExecResult(wire)
    if code == 127 and result.exit_code == 127:
        _tell_missing(argv[0], str(sandbox.get("image") or ""))
    elif code not in (0, 124) and not mounted:
        _tell_unmounted(argv)
    return code


def _tell_missing(program: str, image: str) -> None:
    """Name the image that was really used, which need not be the one the command's name stands for."""
    say(f"hint: the image {image} has no `{program}`; install it there, or name another image with --image")


def _tell_unmounted(argv: list[str]) -> None:
    """The one mistake everybody makes: the file is here and not in there."""
    for word in argv[1:]:
        if word and not word.startswith("-") and len(word) < 4096 and "\0" not in word and os.path.isfile(word):
            name = program_name()
            say(
                f"hint: {word} is a file of this machine, which the sandbox does not see: give it on standard input "
                f"(`{name} run {argv[0]} - < {word}`), `{name} cp` it into a sandbox that stays, "
                "or mount this directory with --profile permissive"
            )
            return
