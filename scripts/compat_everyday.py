"""Writes docs/compat/everyday.md: what everyday use needs, and the tests that hold atoll to it.

    python scripts/compat_everyday.py            writes the page
    python scripts/compat_everyday.py --check    says whether it is up to date

A line is named in a test's name (`test_everyday_7_...`, `test_distro_3_...`, in TypeScript "everyday 7: ..."); the table is made by
looking for those names.
"""

import re
from pathlib import Path

import compat_page

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/compat/everyday.md"
NAMED = re.compile(r"^\s*(?:async )?def test_(everyday|distro)_(\d+)_|^test\(\"(everyday) (\d+): ", re.M)

LINES = {
    "everyday 1": "a program that takes too much memory is killed alone; a sandbox that is lost keeps its disk",
    "everyday 2": "idle sessions stop with their files and start again; a loss is told",
    "everyday 3": "which image a command gets does not depend on earlier runs",
    "everyday 4": "archives are read as `tar` writes them; the builder's own error reaches the user",
    "everyday 5": "binary files are marked; raw output has no errors in it",
    "everyday 6": "the remembered session belongs to one gateway",
    "everyday 7": "TypeScript by the document's words, with a local daemon; `serve` beside a daemon on demand",
    "everyday 8": "`from sandbox_client import SandboxClient` works from the wheel",
    "everyday 9": "an entry names its transport as that agent wants it",
    "everyday 10": "iii's `fix` succeeds when it is merged",
    "everyday 11": "`python` where `python3` is; versions, counts, permissions and hints are true",
    "everyday 12": "`--allow-host` adds to the list, and hints use it",
    "everyday 13": "builds and pulls show progress, piped too",
    "everyday 14": "`poll --follow` streams; Ctrl-C reaches the program",
    "everyday 15": "text for people, JSON for programs, one list, one spelling, one way to name a sandbox",
    "everyday 16": "help and hints use the name it was called by; `remove` and `skill install` do no more than they say",
    "everyday 17": "README leads to every guide, TypeScript's too",
    "everyday 19": "signals to a terminal's foreground arrive; a stopped job ends nothing",
    "everyday 20": "closing a terminal that is being read",
    "everyday 21": "the host name resolves",
    "everyday 22": "programs see the sandbox's limits as the machine's size",
    "everyday 23": "arguments of 2 MiB, shell lines of any length, a limit of stdin in bytes",
    "everyday 24": "tools for users in the image `host`; words instead of `apt-get`",
    "everyday 25": "ids above those of a sandbox; shared memory by the memory limit",
    "everyday 26": "agentkernel's published clients see failures as failures",
    "everyday 27": "K8E's frames, events, registry and refusals",
    "everyday 28": "`iii-worker` beside the engine's other daemon",
    "everyday 29": "a user for file operations; typed errors; merged output in true order",
    "everyday 30": "shell sessions and terminals that stay",
    "everyday 31": "a daemon that stops leaves idle sandboxes frozen; the next use thaws them",
    "everyday 32": "bad input, and a daemon that is gone in the middle",
    "distro 1": "an ordinary user's runc since 1.1.15 starts",
    "distro 2": "a gVisor build that crashes is neither picked nor remembered",
    "distro 3": "spares of a killed daemon are found with every engine",
    "distro 4": "a daemon with limits is not replaced by one without",
    "distro 5": "disks that the host unmounts are free",
    "distro 6": "a private group is its user",
    "distro 7": "a wait that ran out is no lasting state",
    "distro 8": "doctor's disk is what a default sandbox needs",
    "distro 9": "doctor judges the daemon that serves",
    "distro 10": "no runtime at all is one problem",
}

HEAD = """# Everyday use

What new users, stock clients and other machines stumbled over, line by line, with the tests that keep it mended. Where a test has
the fixture `anywhere` or `runtime` it runs on every runtime that works on the machine; `tests/rootless/` runs whole suites again as an
ordinary user.
Lines named "distro" were seen on Debian 12, 13 and sid; line 18 of the list is those.

| line | what holds | tests |
|---|---|---|
"""


def found_tests() -> dict[str, set[str]]:
    """Line -> files that test it."""
    found: dict[str, set[str]] = {}
    for path in sorted([*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "sdk/typescript/test").rglob("*.test.mjs")]):
        for match in NAMED.finditer(path.read_text()):
            line = f"{match[1] or match[3]} {match[2] or match[4]}"
            found.setdefault(line, set()).add(str(path.relative_to(ROOT)))
    return found


def main() -> int:
    return compat_page.write(PAGE, HEAD + compat_page.table(LINES, found_tests()), "scripts/compat_everyday.py")


if __name__ == "__main__":
    raise SystemExit(main())
