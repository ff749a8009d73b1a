"""`atoll fn NAME PAYLOAD` calls a function; `atoll iii worker` serves them to an iii engine, also as `iii-worker`."""

from __future__ import annotations

import os
import sys

from atoll.cli.output import say, tell, write
from atoll.cli.session import open_link
from atoll.client.calls import Call
from atoll.client.http import quote
from atoll.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from atoll.cli.grammar import Arguments

STOCK = "III_WORKER_STOCK"
PARENT_CHECK_S = 2.0


def call(arguments: Arguments) -> int:
    """The answer on standard output; for an error its envelope, and exit code 1."""
    name = arguments.rest[0]
    text = arguments.rest[1] if len(arguments.rest) > 1 else "{}"
    body = sys.stdin.buffer.read() if text == "-" else text.encode("utf-8", "surrogateescape")
    exchange = open_link(arguments).open(
        Call("POST", "/functions/" + quote(name).replace("/", "%2F"), body, timeout=None)
    )
    status = exchange.head.status
    if status >= 400:
        return _fail(exchange.body())
    write(1, exchange.body() + b"\n")
    return 0


def _fail(raw: bytes) -> int:
    from atoll.client.codec import loads
    from atoll.errors import from_wire

    error: Any = loads(raw).get("error")
    if error.get("code") != "invocation_failed":
        raise from_wire(error)
    write(1, error["message"].encode() + b"\n")
    return 1


def worker(arguments: Arguments) -> int:
    return _serve(arguments.engine, arguments.config, arguments.namespace)


def _serve(engine: str | None, config: str | None, namespace: str | None, lifeline: int | None = None) -> int:
    from pathlib import Path

    from ..settings import Settings, read
    from ..worker import DEFAULT_URL, serve

    settings = Settings()
    if config is not None:
        try:
            settings, warnings = read(Path(config))
        except InvalidArgument as error:
            say(f"error: {error.message}")
            return 2
        for warning in warnings:
            say(f"warning: {warning}")
    url = engine or os.environ.get("III_URL") or DEFAULT_URL
    return serve(url, settings, namespace=namespace, lifeline=lifeline)


def new_block(arguments: Arguments) -> int:
    from ..settings import NEW_BLOCK

    tell(NEW_BLOCK.rstrip("\n"))
    return 0


def drop_in(argv: Sequence[str] | None = None) -> int:
    """The program `iii-worker`: `sandbox-daemon --config FILE` is ours, everything else goes to the stock one.

    An engine starts `worker-manager-daemon` by itself, and again whenever it ends. Without the stock program nobody
    serves `worker::*`, so that process only stays until the engine goes.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    lifeline = os.environ.get("III_LIFELINE_FD", "")
    held = int(lifeline) if lifeline.isdigit() else None
    if words[:1] != ["sandbox-daemon"]:
        stock = os.environ.get(STOCK)
        if not stock and words[:1] == ["worker-manager-daemon"]:
            say(f"atoll serves sandbox::* only; for worker::* set {STOCK} to the stock program")
            return _stay(held)
        if not stock:
            say(f"error: only sandbox-daemon is served here; set {STOCK} to the stock program for the rest")
            return 2
        os.execv(stock, [stock, *words])
    rest = words[1:]
    config: str | None = None
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name != "--config" or (not equals and not rest):
            say(f"error: sandbox-daemon takes --config FILE, not {word!r}")
            return 2
        config = value if equals else rest.pop(0)
    engine = os.environ.get("III_ENGINE_URL") or os.environ.get("III_URL")
    return _serve(engine, config, None, held)


def _stay(lifeline: int | None) -> int:
    """Return 0 when a signal asks for it, when the lifeline closes, or when the parent has gone."""
    import select
    import signal

    parent = os.getppid()
    told, tell_end = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    os.set_blocking(tell_end, False)
    signal.set_wakeup_fd(tell_end)
    watched = [told] if lifeline is None else [told, lifeline]
    while os.getppid() == parent:
        ready, _, _ = select.select(watched, [], [], PARENT_CHECK_S)
        if told in ready or (ready and not os.read(ready[0], 4096)):
            break
    return 0
