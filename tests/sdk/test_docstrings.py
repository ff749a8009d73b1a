"""Every method of the public SDK says what it does and what each parameter is for, in `help()` and in editors."""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from atoll.client.options import CreateOptions, StartOptions

OPTIONS = {"Sandbox.create": CreateOptions, "Sandbox.stream": StartOptions, "Sandbox.start": StartOptions}
MODULES = [
    f"atoll.client.{face}.{name}"
    for face in ("_sync", "_async")
    for name in ("sandbox", "files", "shells", "terminals")
]


def methods() -> Iterator[tuple[str, Any]]:
    """The public methods of a sandbox and of what it gives out, in both faces."""
    for module in MODULES:
        for owner in vars(importlib.import_module(module)).values():
            if inspect.isclass(owner) and owner.__module__ == module and owner.__name__[0] != "_":
                for name, member in inspect.getmembers(owner):
                    function = getattr(member, "__func__", member)
                    if inspect.isfunction(function) and name[0] != "_" and name != "shell":
                        yield f"{owner.__name__}.{name}", function


METHODS = dict(methods())


def test_the_sdk_is_looked_at() -> None:
    assert {"Sandbox.create", "AsyncSandbox.exec", "Files.read", "AsyncFiles.sed", "Command.poll"} <= set(METHODS)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_is_documented(name: str) -> None:
    function = METHODS[name]
    text = inspect.getdoc(function) or ""
    assert text, f"{name} has no docstring"
    documented = set(re.findall(r"^    (\w+): ", text.partition("Args:\n")[2], re.MULTILINE))
    wanted = {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls")
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    wanted |= set(getattr(OPTIONS.get(name.removeprefix("Async")), "__annotations__", ()))
    assert wanted <= documented, f"{name} does not say what these are: {sorted(wanted - documented)}"
