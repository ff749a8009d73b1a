"""A Python session inside a sandbox: runs one order after another in one namespace. It is given to `python3 -c`."""

# ruff: noqa: S102, S307, SIM115, UP031  # it runs code, on whatever Python 3 the image has

import ast
import builtins
import linecache
import os
import signal
import sys
import traceback
import types


def serve(directory: str) -> None:
    orders, told = os.dup(0), os.dup(1)
    scope = types.ModuleType("__main__")
    scope.__dict__["__builtins__"] = builtins
    sys.modules["__main__"], sys.argv, sys.path[:1] = scope, [""], [""]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.write(told, b"ready %d\n" % os.getpid())
    while True:
        runner, name, given = os.read(orders, 4096).split()
        try:
            with open(os.path.join(directory, name.decode()), encoding="utf-8") as file:
                source = file.read()
            take(runner.decode(), given.decode())
        except OSError:  # whoever gave the order is gone already
            code = 1
        else:
            code = run(source, scope.__dict__)
            flush()
        hold()
        answer = b"%s %d\n" % (name, code)
        done = os.open(directory + "/done", os.O_RDWR)
        os.write(done, answer)
        os.close(done)
        os.write(told, answer)


def take(runner: str, given: str) -> None:
    """Have stdout and stderr of the process that gave the order, and the file it gave as stdin."""
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        opened = os.open("/proc/%s/fd/%d" % (runner, number) if number else given, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)


def hold() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)


def run(source: str, scope: dict) -> int:  # type: ignore[type-arg]
    """Return the exit code: 1 after an exception, whose traceback is in stderr, 130 after an interrupt."""
    name = "<shell>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            tree = ast.parse(source, name)
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr):
                tree.body.pop()
            exec(compile(tree, name, "exec"), scope)
            if isinstance(last, ast.Expr):
                sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), scope))
            return 0
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except SystemExit:
        flush()
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


serve(sys.argv[1])
