"""From the steps of a template to the instructions of a build: what the engine does for a Dockerfile it does for both."""

import json
from collections.abc import Callable

from atoll import errors
from atoll.images.build.dockerfile import Instruction
from atoll.model import BuildTemplate

BASES = ("e2bdev/base", "e2bdev/base:latest", "base")  # the image that templates begin with unless they name another
HOST = "host"
SHELL = ["/bin/bash", "-l", "-c"]
# The user that templates run as. An image without tools to make one gets it by hand.
MAKE_USER = """set -e
grep -q '^user:' /etc/passwd && exit 0
grep -q '^user:' /etc/group || echo 'user:x:1000:' >> /etc/group
echo 'user:x:1000:1000::/home/user:/bin/bash' >> /etc/passwd
mkdir -p /home/user && chown 1000:1000 /home/user"""


def instructions(
    asked: BuildTemplate, own: Callable[[str], str | None]
) -> tuple[tuple[Instruction, ...], tuple[str, ...]]:
    """Return the instructions, each with its step's number as its line, and the uploads that they copy from.

    `own` gives the image of one of the caller's templates.
    """
    if asked.from_template:
        base = own(asked.from_template) or asked.from_template
    else:
        base = asked.from_image or HOST
    base = HOST if base in BASES else base
    found = [Instruction(0, "FROM", base)]
    if base != HOST and not asked.from_template:
        found.append(Instruction(0, "RUN", json.dumps(["/bin/sh", "-c", MAKE_USER])))
    found.append(Instruction(0, "SHELL", json.dumps(SHELL)))
    user = "user"
    found += [Instruction(0, "USER", user), Instruction(0, "WORKDIR", "/home/user")]
    uploads: list[str] = []
    for number, step in enumerate(asked.steps, 1):
        args = [*step.args, "", "", "", ""]
        if step.kind == "RUN":
            other = args[1] or user
            found += [Instruction(number, "USER", other)] if other != user else []
            found.append(Instruction(number, "RUN", json.dumps([*SHELL, args[0]])))
            found += [Instruction(number, "USER", user)] if other != user else []
        elif step.kind == "COPY":
            if not step.files_hash:
                raise errors.InvalidArgument(f"step {number}: COPY has no filesHash")
            uploads.append(step.files_hash)
            flags = {"chown": quoted(args[2] or user)} | ({"chmod": args[3]} if args[3] else {})
            words = json.dumps([quoted(f"{step.files_hash}/{args[0]}"), quoted(args[1])])
            found.append(Instruction(number, "COPY", words, flags))
        elif step.kind == "ENV":
            if len(step.args) % 2 or not step.args:
                raise errors.InvalidArgument(f"step {number}: ENV needs names and values")
            pairs = zip(step.args[::2], step.args[1::2], strict=True)
            found.append(Instruction(number, "ENV", " ".join(quoted(f"{name}={value}") for name, value in pairs)))
        elif step.kind == "WORKDIR":
            found.append(Instruction(number, "WORKDIR", quoted(args[0])))
        elif step.kind == "USER":
            user = args[0]
            found.append(Instruction(number, "USER", quoted(user)))
        else:
            raise errors.InvalidArgument(f"step {number}: {step.kind!r:.40} is no kind of step")
    return tuple(found), tuple(dict.fromkeys(uploads))


def quoted(text: str) -> str:
    """Return a text that stays as it is when variables are expanded."""
    return "'" + text.replace("'", "'\\''") + "'"
