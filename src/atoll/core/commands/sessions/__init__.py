"""The programs of a shell session inside a sandbox, and the requests that start them.

A session is one process that stays: `sh` (BOOT) around an interpreter. Its directory has two FIFOs: `orders`, which
the interpreter reads, and `done`, on which it tells how a command ended. A command of a session is an ordinary command of
the sandbox, a small `sh`: it writes an order and waits for the answer. The interpreter opens stdout and stderr of that
`sh` for the time of the command, so output, offsets, limits, records and timeouts are those of every other command. The
interpreter's own stdout carries `ready PID`, and one line per command that is over.
"""

from pathlib import Path

from atoll import errors
from atoll.core.commands.languages import BASH, BY_NAME, NODE, PYTHON, Call
from atoll.model import ExecSpec, OpenShell, RunSpec

DIRECTORY = "/tmp/.atoll-shell-"

UNSHARED = 125  # exit code of BOOT: this user cannot open the standard streams of its own commands anew
BOOT = """\
[ -w "/proc/$$/fd/1" ] || exit 125
mkdir -m 700 "$0" && mkfifo -m 600 "$0/orders" "$0/done" || exit 126
exec 0<>"$0/orders"
case $1 in bash) command -v bash >/dev/null || { shift $#; set -- sh -i; }; printf '%s\\n' "$ATOLL_INIT" 1<>"$0/orders" ;; esac
unset ATOLL_INIT
command -v "$1" >/dev/null || exit 127
"$@"
c=$?
printf 'end %s\\n' "$c" 1<>"$0/done"
exit "$c"
"""
# The answer is written down twice: for the command that waits, and for the daemon. `$?` is left as it was.
BASH_INIT = """\
PS1= PS2=; [ -z "$BASH_VERSION" ] || set +o history +H
__atoll_done() {{ set -- "$?" "$1"; printf '%s %s\\n' "$2" "$1" 1<>{directory}/done; printf '%s %s\\n' "$2" "$1"; \
case $- in *e*) ;; *) return "$1" ;; esac; }}
printf 'ready %s\\n' "$$"
"""
_WAIT = """
while read -r t c <&3; do
  if [ "$t" = "$1" ] || [ "$t" = end ]; then [ -z "$2" ] || rm -f "$i"; exit "$c"; fi
done
"""
# Standard input goes into a file first: a pipe whose writer is gone cannot be opened again.
_OPEN = """\
exec 3<>"$0/done" || exit 126
i=/dev/null
[ -z "$2" ] || { i=$0/$1.in; cat >"$i"; }
"""
# In a subshell: while printf writes to the FIFO, the streams of this process must not be the FIFO.
_BASH_ORDER = (
    "(printf \". '%s' 0<'%s' >|/proc/$$/fd/1 2>|/proc/$$/fd/2\\n__atoll_done %s\\n\" "
    '"$0/$1" "$i" "$1" 1<>"$0/orders")'
)
_ORDER = '(printf "$$ %s %s\\n" "$1" "$i" 1<>"$0/orders")'


class ShellProcess(ExecSpec, kw_only=True):
    """The process of a session; `opens` is its language."""

    opens: str


class ShellCommand(RunSpec, kw_only=True):
    """A command of the session `shell`."""

    shell: str
    user: str | None = None


def directory_of(shell: str) -> str:
    return DIRECTORY + shell


def process_spec(asked: OpenShell, shell: str) -> ShellProcess:
    """Return what starts a session; InvalidArgument for a language that has none."""
    language = BY_NAME.get(asked.language.lower())
    directory, env = directory_of(shell), dict(asked.env)
    if language is BASH:
        argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        env["ATOLL_INIT"] = BASH_INIT.format(directory=directory)
    elif language is PYTHON:
        argv = ["python3", "-c", _driver("python.py"), directory]
    elif language is NODE:
        argv = ["node", "-e", _driver("node.js"), directory]
    else:
        raise errors.InvalidArgument(f"no sessions in {asked.language!r:.40}", hint="one of bash, python, node")
    return ShellProcess(
        argv=["/bin/sh", "-c", BOOT, directory, *argv], id=shell, opens=language.name, env=env, cwd=asked.cwd,
        user=asked.user, background=True, timeout_ms=0,
    )  # fmt: skip


def command_call(spec: ShellCommand, command_id: str) -> Call:
    """Return how a command of a session is started."""
    language = BY_NAME[spec.language]
    directory = directory_of(spec.shell)
    try:
        code = spec.code.encode()
    except UnicodeEncodeError:
        raise errors.InvalidArgument("the command is not valid Unicode") from None
    runner = _OPEN + (_BASH_ORDER if language is BASH else _ORDER) + _WAIT
    argv = ["/bin/sh", "-c", runner, directory, command_id]
    if spec.stdin_bytes() is not None:
        argv.append("stdin")
    return Call(argv, language, f"{directory}/{command_id}", code, {}, spec.user)


def _driver(name: str) -> str:
    return (Path(__file__).parent / name).read_text()
