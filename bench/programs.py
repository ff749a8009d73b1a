"""Programs of this machine: where they are, and running one to its end."""

import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
PYTHON = "/usr/bin/python3"  # the one sandboxes run; the first on PATH may be a slow shim
NODE = "/usr/bin/node"


class Unavailable(Exception):
    """Why something cannot run here."""


def find(program: str) -> str:
    found = shutil.which(program, path=SEARCH)
    if found is None:
        raise Unavailable(f"{program} is not installed")
    return found


def run(argv: list[str], **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run a program. When it fails, the error holds its last words on stderr."""
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    done = subprocess.run(argv, capture_output=True, **options)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        raise RuntimeError(f"exit {done.returncode}: {last[0]}")
    return done


def bare(argv: list[str]) -> Callable[[], object]:
    return lambda: run(argv)
