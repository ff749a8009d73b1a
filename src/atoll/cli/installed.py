"""Where this program is installed."""

from __future__ import annotations

import os
import sys

from ..errors import InvalidArgument


def installed_program() -> str:
    """Return the installed program's path, also when this process was started as a module."""
    called = os.path.abspath(sys.argv[0])
    if os.path.basename(called) == "__main__.py":
        called = os.path.join(os.path.dirname(sys.executable), "atoll")
    called = os.path.realpath(called)
    if not os.access(called, os.X_OK):
        raise InvalidArgument(f"{called} is not an installed program")
    return called
