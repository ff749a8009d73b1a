"""Makes this interpreter one of a machine that is not Linux: what only Linux or only Unix has is gone from here on."""

import _socket
import importlib
import os
import select
import signal
import socket
import sys

# Parts of the standard library that look at the name of the system are loaded under its true one.
for _name in ("ssl", "subprocess", "tempfile", "asyncio"):
    importlib.import_module(_name)
GONE = {
    *("fcntl", "termios", "tty", "pty", "pwd", "grp", "resource", "syslog", "uvloop", "httptools", "uvicorn", "zstandard"),
    *("grpc", "grpc_health", "grpc_reflection", "atoll.server", "atoll.core", "atoll.backends", "atoll.egress"),
    *("atoll.guest", "atoll.images"),
}  # fmt: skip
OF_UNIX = (
    "fork",
    "geteuid",
    "getuid",
    "getgid",
    "getegid",
    "uname",
    "O_PATH",
    "O_CLOEXEC",
    "O_NOFOLLOW",
    "O_DIRECTORY",
)


class _Gone:
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name in GONE or name.partition(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _Gone())
for _name in GONE & set(sys.modules):
    del sys.modules[_name]
for _name in OF_UNIX:
    if hasattr(os, _name):
        delattr(os, _name)

for _module in (socket, _socket):
    for _name in ("AF_UNIX", "SOCK_CLOEXEC"):
        if hasattr(_module, _name):
            delattr(_module, _name)
for _name in ("SIGWINCH", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGTSTP", "SIGPIPE"):
    delattr(signal, _name)
del select.poll
sys.platform = "win32"
