"""`pipeline`: steps one after the other, each in a sandbox of its own, with a directory handed from one to the next.
`parallel`: jobs at once. What a step makes passes through this process as a tar and is never unpacked here.
"""

from __future__ import annotations

import time

from atoll.cli.grammar import UsageError
from atoll.cli.output import OWN_FAILURE, say, tell, write
from atoll.cli.session import open_link
from atoll.client import calls
from atoll.client._sync.driver import Link
from atoll.client.results import ExecResult, Output
from atoll.errors import AtollError, InvalidArgument, NotFound

from .policy import create_fields
from .words import image_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from atoll.cli.grammar import Arguments
    from atoll.client.wire import SandboxFields

KEYS = {"name", "image", "command", "input", "output"}
MAX_JOBS = 64


def pipeline(arguments: Arguments) -> int:
    steps = _read(arguments.rest[0])
    began = time.monotonic()
    link = open_link(arguments)
    fields = _fields(arguments, link)
    handed: str | None = None
    handed_from = ""
    try:
        for number, step in enumerate(steps, 1):
            started = time.monotonic()
            ref = _create(link, fields, step["image"])
            try:
                if step.get("input") and handed is not None:
                    _hand_over(link, handed, handed_from, ref, step["input"])
                elif step.get("input"):
                    _make_directory(link, ref, step["input"])
                if step.get("output"):
                    _make_directory(link, ref, step["output"])
                code = _execute(link, ref, step["argv"], stream=True)[0]
            except BaseException:
                _destroy(link, ref)
                raise
            if handed is not None:
                _destroy(link, handed)
            handed, handed_from = ref, step.get("output") or ""
            if code:
                say(f"[{number}/{len(steps)}] {step['name']} failed with {code}")
                return code
            tell(f"[{number}/{len(steps)}] {step['name']} done ({time.monotonic() - started:.1f}s)")
            if not handed_from:
                _destroy(link, ref)
                handed = None
    finally:
        if handed is not None:
            _destroy(link, handed)
    tell(f"{len(steps)} steps done ({time.monotonic() - began:.1f}s)")
    return 0


def _read(path: str) -> list[dict[str, Any]]:
    import shlex
    import tomllib

    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except OSError as failure:
        raise InvalidArgument(f"{path}: {failure.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as bad:
        raise InvalidArgument(f"{path}: {bad}") from None
    steps = data.get("step")
    if not isinstance(steps, list) or not steps:
        raise InvalidArgument(f"{path} has no [[step]]")
    seen: set[str] = set()
    for step in steps:
        unknown = sorted(set(step) - KEYS)
        if unknown or not all(isinstance(value, str) for value in step.values()):
            raise InvalidArgument(f"{path}: a step has name, image, command, input, output, all texts; not {unknown}")
        name = step.get("name") or ""
        if not name or "/" in name or "\\" in name or ".." in name or name in seen:
            raise InvalidArgument(f"{path}: {name!r:.80} is no name for a step, or there are two of it")
        seen.add(name)
        for key in ("input", "output"):
            place = step.get(key)
            if place is not None and (not place.startswith("/") or ".." in place.split("/")):
                raise InvalidArgument(f"{path}: {key} of {name} must be an absolute path")
        try:
            step["argv"] = shlex.split(step.get("command") or "")
        except ValueError as bad:
            raise InvalidArgument(f"{path}: command of {name}: {bad}") from None
        if not step["argv"]:
            raise InvalidArgument(f"{path}: step {name} has no command")
        step["image"] = image_name(step.get("image") or "auto")
    return steps


def parallel(arguments: Arguments) -> int:
    """All at once; every job's output under its name when it is done."""
    import threading

    jobs = [_job(text) for text in arguments.job]
    if not jobs or len(jobs) > MAX_JOBS:
        raise UsageError(f"parallel needs 1 to {MAX_JOBS} jobs: -j NAME:IMAGE:COMMAND")
    link = open_link(arguments)
    fields = _fields(arguments, link)
    codes: dict[str, int] = {}
    printing = threading.Lock()

    def work(name: str, image: str, argv: list[str]) -> None:
        own = Link(link.home, path=link.path)
        code, output = OWN_FAILURE, b""
        try:
            ref = _create(own, fields, image, argv[0])
            try:
                code, output = _execute(own, ref, argv, stream=False)
            finally:
                _destroy(own, ref)
        except AtollError as error:
            say(f"atoll: {name}: {error.message}")
        finally:
            own.close()
        with printing:
            codes[name] = code
            tell(f"[{name}] {'done' if not code else f'failed with {code}'}")
            write(1, output)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if any(codes.get(name, 1) for name, _, _ in jobs) else 0


def _job(text: str) -> tuple[str, str, list[str]]:
    """`name:image[:tag]:command`: a word after the image is its tag if another colon follows it and no blank is in it."""
    import shlex

    name, colon, rest = text.partition(":")
    image, colon2, command = rest.partition(":")
    first, colon3, after = command.partition(":")
    if colon3 and first and " " not in first and after:
        image, command = f"{image}:{first}", after
    if not (name and colon and image and colon2 and command.strip()):
        raise UsageError(f"{text!r:.80} is not a job", "NAME:IMAGE:COMMAND")
    return name, image_name(image), shlex.split(command)


def _fields(arguments: Arguments, link: Link) -> SandboxFields:
    values = {"profile": None, "memory": None, "cpus": None, "env": [], **arguments.values}
    fields = create_fields(type(arguments)([], values, arguments.verb), None, link)
    if "hosts" not in fields and "mode" not in fields:
        fields["hosts"] = link.call(calls.get("/v1/policy/hosts", {"of": "run"}))["hosts"]
    return fields


def _create(link: Link, fields: SandboxFields, image: str, program: str | None = None) -> str:
    more: SandboxFields = {"image": image}
    if image == "auto":
        more["program"] = program or "sh"
    return str(link.call(calls.create({**fields, **more, "lifetime_s": 86_400.0}))["id"])


def _destroy(link: Link, ref: str) -> None:
    try:
        link.call(calls.destroy(ref))
    except NotFound:
        pass


def _make_directory(link: Link, ref: str, path: str) -> None:
    link.call(calls.file_operation(ref, "mkdir", {"path": path, "parents": True, "exist_ok": True}))


def _hand_over(link: Link, source: str, output: str, target: str, path: str) -> None:
    """From the output directory of one sandbox to the input directory of the next, as a stream."""
    _make_directory(link, target, path)
    if not output:
        return
    other = Link(link.home, path=link.path)
    try:
        exchange = other.open(calls.tar(source, output, upload=False))
        exchange.raise_for_status()
        link.open(calls.tar(target, path, upload=True), iter(exchange.read, b"")).json()
    finally:
        other.close()


def _execute(link: Link, ref: str, argv: list[str], *, stream: bool) -> tuple[int, bytes]:
    exchange = link.open(calls.start(ref, argv, frames=True, timeout=None))
    exchange.raise_for_status()
    kept: list[bytes] = []
    for value in exchange.frames():
        if isinstance(value, Output):
            if stream:
                write(1 if value.stream == "stdout" else 2, value.data)
            else:
                kept.append(value.data)
        elif isinstance(value, dict):
            code = ExecResult(value).exit_code
            return OWN_FAILURE if code is None else code & 255, b"".join(kept)
    return OWN_FAILURE, b"".join(kept)
