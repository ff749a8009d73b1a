"""`atoll image build`: the Dockerfile and the directory go to the daemon, which builds in sandboxes; its steps are shown."""

from __future__ import annotations

import os
import sys

from ..client.archive import pack
from ..client.calls import Call
from ..errors import InvalidArgument, NotFound
from .images import INTERPRETER, fetch, pull, tell_image, watch
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .grammar import Arguments

MAX_DOCKERFILE = 262_144


def build(arguments: Arguments) -> int:
    if arguments.debian:
        return watch(arguments, "/v1/images/build", {"name": arguments.rest[0], "debian": arguments.debian})
    context = arguments.rest[0]
    if context == INTERPRETER and not os.path.isdir(context):
        return pull(arguments)
    if not os.path.isdir(context):
        raise NotFound(
            f"{context} is not a directory", hint="CONTEXT is the directory whose files the Dockerfile copies"
        )
    image = build_directory(
        arguments, context, arguments.file, name=arguments.tag or "", args=dict(arguments.build_arg),
        target=arguments.target or "", no_cache=bool(arguments.no_cache), runtime=arguments.runtime or "auto",
    )  # fmt: skip
    tell_image(image)
    return 0


def build_directory(arguments: Arguments, context: str, file: str | None, **fields: object) -> Mapping[str, Any]:
    """Upload a directory and build it; the image."""
    text = read_dockerfile(context, file)
    headers = (("Content-Type", "application/x-tar"),)
    call = Call("POST", "/v1/images/contexts", b"", headers, timeout=None)
    uploaded = open_link(arguments).open(call, pack(context, keeps=kept(context))).json()
    return fetch(arguments, "/v1/images/build-file", {**fields, **uploaded, "dockerfile": text})


def read_dockerfile(context: str, file: str | None) -> str:
    """Return the text of the Dockerfile: the named one, stdin for `-`, or the context's own."""
    if file == "-":
        data = sys.stdin.buffer.read(MAX_DOCKERFILE + 1)
    else:
        path = file or next(
            (path for name in ("Dockerfile", "Containerfile") if os.path.isfile(path := os.path.join(context, name))),
            "",
        )
        if not path:
            raise NotFound(f"{context} has no Dockerfile", hint="name it with --file")
        try:
            with open(path, "rb") as opened:
                data = opened.read(MAX_DOCKERFILE + 1)
        except OSError as error:
            raise NotFound(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_DOCKERFILE:
        raise InvalidArgument(f"a Dockerfile has at most {MAX_DOCKERFILE} bytes")
    return data.decode("utf-8", "replace")


def kept(context: str) -> Callable[[str], bool]:
    """Return what says whether a path below the context is sent. What `.dockerignore` names stays here."""
    try:
        with open(os.path.join(context, ".dockerignore"), encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return lambda path: True
    from ..images.build.ignore import Ignore

    ignore = Ignore(text)
    return lambda path: path == ".dockerignore" or ignore.takes_back or not ignore.leaves_out(path)
