"""`atoll doctor --fix`: does what doctor advises, after showing it and asking, and says what is left.

Only advice with a command of its own is carried out. What weighs one good against another (switching swap or hyperthreading off) and what
no command can do (another kernel) is left to the person, with the words of the check.
"""

from __future__ import annotations

import os
import subprocess
import sys

from .output import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypedDict

    from .doctor_causes import Cause

    class Done(TypedDict):
        """A command that was run, and whether it succeeded."""

        command: str
        ok: bool


def agreed(found: Sequence[Cause], *, yes: bool) -> bool:
    """Show what would be done and return whether it may be: with `yes` at once, else when a person at the terminal says so."""
    steps = [cause.run for cause in found if cause.run]
    if not steps:
        say("nothing here can be mended by a command of doctor's")
        return False
    say("this will be done:")
    for step in steps:
        say(f"  {step}")
    if yes:
        return True
    if not os.isatty(0):
        say("nothing was done: no terminal to ask at; --yes does it without asking")
        return False
    sys.stderr.write("Go on? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def carry_out(found: Sequence[Cause]) -> list[Done]:
    """Run the command of each cause, one after another; one that fails does not keep the others from being run."""
    done: list[Done] = []
    for cause in found:
        if not cause.run:
            continue
        say(f"-> {cause.run}")
        ended = subprocess.run(["/bin/sh", "-c", cause.run], stdout=2, env=_environment(), check=False)
        if ended.returncode:
            say(f"   failed with exit code {ended.returncode}")
        done.append({"command": cause.run, "ok": ended.returncode == 0})
    return done


def _environment() -> dict[str, str]:
    """The caller's, with the directories of system programs, and without questions of Debian's installer."""
    path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "DEBIAN_FRONTEND": "noninteractive"}
