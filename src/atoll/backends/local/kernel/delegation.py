"""An ordinary user's daemon among control groups of its own, so that the limits of its sandboxes hold.

A session over ssh has none to give. Where the user's service manager answers, the daemon starts itself again in a scope of that manager,
which has. A daemon that held limits is never followed by one that cannot, unless it was stopped by `atoll daemon stop`: the home remembers
them, and the next daemon refuses to start without.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from atoll.backends.local import binaries
from atoll.backends.local.kernel.cgroups import Hierarchies
from atoll.errors import Unsupported

CONTROLLERS = ("cpu", "memory", "pids")
MARK = "held-limits"  # of a home: the controllers that its daemon has
START = "systemd-run --user --scope -p Delegate=yes atoll daemon start"
_AGAIN = "ATOLL_IN_SCOPE"  # set for the second start
_TIMEOUT = 30.0


def ensure(home: Path) -> None:
    """Return with the best control groups this user can have; may start this program again. Call it first of all."""
    again = os.environ.pop(_AGAIN, None) is not None
    if os.geteuid() == 0:
        return
    held = _held()
    if len(held) < len(CONTROLLERS) and not again:
        _start_in_scope()  # returns only where that cannot be done
    before = remembered(home)
    if missing := [name for name in before if name not in held]:
        raise Unsupported(
            f"the daemon before this one held limits for {', '.join(before)}, and this one cannot hold {', '.join(missing)}",
            hint=f"{START}; to go on without limits, remove {home / MARK}",
        )
    if held and held != before:
        with suppress(OSError):  # a home that cannot be written is found out later, with its own error
            (home / MARK).write_text(" ".join(held) + "\n")


def remembered(home: Path) -> list[str]:
    """The controllers that the last daemon of a home had, if it was not stopped on purpose."""
    try:
        words = (home / MARK).read_text().split()
    except OSError:
        return []
    return [name for name in CONTROLLERS if name in words]


def forget(home: Path) -> None:
    """A daemon that is stopped on purpose may be followed by any other one."""
    with suppress(OSError):
        (home / MARK).unlink()


def _held() -> list[str]:
    given = Hierarchies.detect().delegated()
    return [name for name in CONTROLLERS if given.holder(name)]


def _start_in_scope() -> None:
    """Become a program of the user's service manager, in a scope that it delegates."""
    program, runtime = binaries.system("systemd-run"), os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if program is None or not os.path.exists(f"{runtime}/systemd/private"):
        return
    env = {**os.environ, "XDG_RUNTIME_DIR": runtime, _AGAIN: "1"}
    argv = [program, "--user", "--scope", "--quiet", "-p", "Delegate=yes", "--"]
    try:
        tried = subprocess.run(
            [*argv, "true"], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if tried.returncode == 0:
        os.execve(program, [*argv, sys.executable, *sys.orig_argv[1:]], env)
