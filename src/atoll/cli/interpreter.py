"""`atoll interpreter`: cells of code in Jupyter kernels, with charts shown in terminals that can, else saved as files."""

from __future__ import annotations

import base64
import binascii
import os
import sys
import tempfile

from ..client import calls
from ..client.results import CellOutcome, CellResult, Event, Output
from ..errors import AtollError
from .output import safe, safe_bytes, say, tell, write
from .session import open_link, reference
from .unfinished import is_unfinished

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..client._sync.driver import Link
    from .grammar import Arguments

IMAGE = "code-interpreter-v1"
TIMEOUT = 300.0
PIECE = 4096  # characters of an image in one escape sequence of kitty's protocol
ENDINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg"}
UNFINISHED = {"python": "python", "javascript": "node", "bash": "bash"}  # the languages whose blocks are recognised


def interpreter(arguments: Arguments) -> int:
    """Run cells; 1 when the last one failed."""
    link = open_link(arguments)
    if arguments.rest:
        return _use(link, reference(arguments.rest[0]), arguments)
    made = link.call(calls.create({"image": IMAGE}))["id"]
    try:
        return _use(link, made, arguments)
    finally:
        link.call(calls.destroy(made))


def _use(link: Link, ref: str, arguments: Arguments) -> int:
    cells: Iterator[str]
    if arguments.command is not None:
        cells = iter([arguments.command])
    elif os.isatty(0):
        cells = _typed(arguments.lang)
    else:
        cells = iter([sys.stdin.read()])
    code = 0
    for cell in cells:
        code = _run(link, ref, cell, arguments)
    return code


def _typed(language: str) -> Iterator[str]:
    """Yield what a person types; a block goes on until it is complete or a line is empty. Ctrl-C drops what was typed."""
    import readline  # noqa: F401  # `input` edits lines and remembers them

    lines: list[str] = []
    count = 1
    while True:
        try:
            lines.append(input("... " if lines else f"In [{count}]: "))
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("")
            lines.clear()
            continue
        cell = "\n".join(lines)
        kind = UNFINISHED.get(language)
        if cell.strip() and (not lines[-1].strip() or kind is None or not is_unfinished(kind, cell)):
            count += 1
            yield cell
            lines.clear()
        elif not cell.strip():
            lines.clear()


def _run(link: Link, ref: str, cell: str, arguments: Arguments) -> int:
    """Run one cell and show what comes. Ctrl-C hangs up, which interrupts it."""
    call = calls.run_cell(ref, cell, arguments.lang, timeout=arguments.timeout or TIMEOUT, frames=True)
    exchange = link.open(call)
    try:
        exchange.raise_for_status()
        for value in exchange.frames():
            if isinstance(value, Output):
                descriptor = 1 if value.stream == "stdout" else 2
                write(descriptor, safe_bytes(value.data) if os.isatty(descriptor) else value.data)
            elif isinstance(value, Event) and "result" in value.data:
                _show(CellResult(value.data["result"]), arguments.save)
            elif isinstance(value, dict):
                return _ended(CellOutcome(value))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        exchange.close()
    raise AtollError("the cell ended without an outcome")


def _ended(outcome: CellOutcome) -> int:
    if outcome.truncated:
        say("atoll: the cell showed more than is passed on; the rest was dropped")
    if outcome.timed_out:
        say("atoll: the cell took too long and was interrupted")
        return 124
    if outcome.error is not None:
        say(outcome.error.traceback or f"{outcome.error.name}: {outcome.error.value}")
        return 1
    return 0


def _show(result: CellResult, save: str | None) -> None:
    for data in (result.png, result.jpeg):
        raw = _decoded(data)
        if raw is None:
            continue
        shown = None if save or not os.isatty(1) else drawing(raw, os.environ)
        if shown is not None:
            write(1, shown + b"\n")
        else:
            tell(_saved(raw, save))
        return
    text = result.text if result.text is not None else result.markdown or result.latex or result.svg or result.html
    if isinstance(text, str):
        write(1, ((safe(text) if os.isatty(1) else text) + "\n").encode("utf-8", "replace"))


def _decoded(data: object) -> bytes | None:
    """Return the bytes of an image; None for anything else that the sandbox calls one."""
    if not isinstance(data, str):
        return None
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if any(raw.startswith(magic) for magic in ENDINGS) else None


def drawing(raw: bytes, environment: Mapping[str, str]) -> bytes | None:
    """Return what makes this terminal show an image; None where it cannot."""
    program, terminal = environment.get("TERM_PROGRAM", ""), environment.get("TERM", "")
    encoded = base64.b64encode(raw).decode()
    if program in ("iTerm.app", "WezTerm"):
        return f"\x1b]1337;File=inline=1;size={len(raw)}:{encoded}\x07".encode()
    if "kitty" in terminal or "KITTY_WINDOW_ID" in environment or program == "ghostty":
        if not raw.startswith(b"\x89PNG"):
            return None  # that is the one kind it takes as it is
        pieces = [encoded[at : at + PIECE] for at in range(0, len(encoded), PIECE)]
        first = "a=T,f=100,"
        return "".join(
            f"\x1b_G{first if not at else ''}m={int(at + 1 < len(pieces))};{piece}\x1b\\"
            for at, piece in enumerate(pieces)
        ).encode()
    return None


def _saved(raw: bytes, directory: str | None) -> str:
    """Write an image to a file of its own, and return the path."""
    ending = next(ending for magic, ending in ENDINGS.items() if raw.startswith(magic))
    if directory:
        os.makedirs(directory, exist_ok=True)
    fd, path = tempfile.mkstemp(prefix="atoll-chart-", suffix=f".{ending}", dir=directory or None)
    with os.fdopen(fd, "wb") as file:
        file.write(raw)
    return path
