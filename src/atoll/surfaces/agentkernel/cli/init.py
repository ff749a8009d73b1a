"""`init` writes a project's file; `agents` looks which coding agents are here."""

from __future__ import annotations

import os

from atoll.cli.grammar import UsageError
from atoll.cli.output import print_json, tell
from atoll.errors import AlreadyExists
from atoll.profiles import MODES, nearest

from .words import sandbox_name, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from atoll.cli.grammar import Arguments

# agent, its program, the variable with its key
AGENTS = (
    ("claude", "claude", "ANTHROPIC_API_KEY"),
    ("codex", "codex", "OPENAI_API_KEY"),
    ("gemini", "gemini", "GOOGLE_API_KEY"),
)

TEXT = """# How this project's commands are sandboxed. See docs/policy.md of atoll.
[sandbox]
name = "{name}"
runtime = "{runtime}"

[agent]
preferred = "{agent}"
compatibility_mode = "{agent}"

[resources]
vcpus = 1
memory_mb = 512

[security]
profile = "moderate"
"""


def init(arguments: Arguments) -> int:
    if arguments.agent not in MODES or arguments.agent == "native":
        raise UsageError(f"unknown agent {arguments.agent!r}", nearest(arguments.agent, [row[0] for row in AGENTS]))
    name = sandbox_name(arguments.name) if arguments.name else _plain(os.path.basename(os.getcwd()))
    from pathlib import Path

    from atoll.images import Catalog, detect
    from atoll.images.catalog import RUNTIMES

    found = detect([], Path(os.getcwd()), Catalog.load()).image_name
    text = TEXT.format(name=name, agent=arguments.agent, runtime=found if found in RUNTIMES else "base")
    try:
        descriptor = os.open("agentkernel.toml", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise AlreadyExists("agentkernel.toml is there already") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    tell("Created agentkernel.toml")
    return 0


def _plain(text: str) -> str:
    """A directory's name as a sandbox's."""
    words = "".join(c if c.isascii() and c.isalnum() else "-" for c in text).split("-")
    return "-".join(word for word in words if word)[:63].strip("-") or "project"


def agents(arguments: Arguments) -> int:
    import shutil

    found = [
        {
            "agent": name,
            "installed": shutil.which(program) is not None,
            "key": bool(os.environ.get(key)),
            "variable": key,
        }
        for name, program, key in AGENTS
    ]
    if arguments.json:
        print_json(found)
        return 0
    rows = [
        (
            str(row["agent"]),
            "installed" if row["installed"] else "not installed",
            f"{row['variable']} {_set(row['key'])}",
        )
        for row in found
    ]
    tell(table(("AGENT", "STATUS", "API KEY"), rows))
    return 0


def _set(value: object) -> str:
    return "set" if value else "not set"
