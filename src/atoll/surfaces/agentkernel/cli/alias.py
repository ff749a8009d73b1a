"""`alias install`: this program under another name, for people whose scripts say agentkernel, k8e or k8e-sandbox."""

from __future__ import annotations

import os

from atoll.cli.grammar import UsageError
from atoll.cli.installed import installed_program
from atoll.cli.output import say, tell
from atoll.errors import AlreadyExists, InvalidArgument, NotFound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from atoll.cli.grammar import Arguments

NAMES = ("agentkernel", "k8e", "k8e-sandbox", "k8e-sandbox-cli", "iii-worker")


def install(arguments: Arguments) -> int:
    """A link on PATH; never over a program that is there."""
    name, program = _name(arguments), installed_program()
    directory = os.path.abspath(arguments.rest[1]) if len(arguments.rest) > 1 else os.path.dirname(program)
    path = os.path.join(directory, name)
    if os.path.lexists(path):
        if os.path.realpath(path) == os.path.realpath(program):
            tell(f"{path} is there already")
            return 0
        raise AlreadyExists(f"{path} is another program; it stays as it is", hint="give another directory")
    import shutil

    other = shutil.which(name)
    if other is not None and os.path.realpath(other) != os.path.realpath(program):
        raise AlreadyExists(f"{other} is another program of that name; no link was made")
    try:
        os.symlink(program, path)
    except OSError as failure:
        raise InvalidArgument(f"{path}: {failure.strerror}") from None
    tell(f"{path} -> {program}")
    if directory not in os.environ.get("PATH", "").split(os.pathsep):
        say(f"hint: {directory} is not on your PATH")
    return 0


def remove(arguments: Arguments) -> int:
    name, program = _name(arguments), installed_program()
    directory = os.path.abspath(arguments.rest[1]) if len(arguments.rest) > 1 else os.path.dirname(program)
    path = os.path.join(directory, name)
    if not os.path.islink(path) or os.path.realpath(path) != os.path.realpath(program):
        raise NotFound(f"{path} is not a link to this program")
    os.unlink(path)
    tell(f"{path} removed")
    return 0


def _name(arguments: Arguments) -> str:
    name: str = arguments.rest[0]
    if name not in NAMES:
        raise UsageError(f"atoll has no other name {name!r}", "one of " + ", ".join(NAMES))
    return name
