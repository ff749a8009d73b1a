"""ESC-14: no part of the host ever evaluates what came from a request; code runs in sandboxes only."""

import ast
from pathlib import Path

import atoll

FORBIDDEN = {"eval", "exec", "compile"}
INSIDE = "core/commands/sessions/python.py"  # a program of shells that is sent into the sandbox as text
MODULES = {"pickle", "marshal", "shelve", "dill", "jsonpickle"}


def offences(text: str, where: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN:
            found.append(f"{where}:{node.lineno} {node.func.id}")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("unsafe_load", "full_load")
        ):
            found.append(f"{where}:{node.lineno} {node.func.attr}")
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        found += [f"{where}:{node.lineno} import {name}" for name in names if name in MODULES]
        if (
            isinstance(node, ast.keyword)
            and node.arg == "shell"
            and isinstance(node.value, ast.Constant)
            and node.value.value
        ):
            found.append(f"{where}:{node.value.lineno} shell=True")
    return found


def imported(text: str) -> list[str]:
    """The full name of each thing a module imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{name.name}" for name in node.names]
    return found


def test_the_check_finds_what_it_looks_for() -> None:
    """Control."""
    assert len(offences("eval(x)\nimport pickle\nsubprocess.run(x, shell=True)\nyaml.unsafe_load(x)", "x")) == 4


def test_host_packages_evaluate_nothing() -> None:
    """No eval, exec, compile, pickle or shell in the package; a sandboxed interpreter is the only place for code."""
    top = Path(atoll.__file__).parent
    files = [path for path in top.rglob("*.py") if "/pb/" not in str(path)]
    assert len(files) > 50
    texts = {str(path.relative_to(top)): path.read_text() for path in files}
    inside = texts.pop(INSIDE)
    assert offences(inside, INSIDE)
    assert [line for name, text in texts.items() for line in offences(text, name)] == []
    imports = [
        f"{name}: {found}" for name, text in texts.items() for found in imported(text) if "sessions.python" in found
    ]
    assert imports == [], "the host imports a program of the sandbox"
