"""Sandbox and AsyncSandbox are one face: the same names, the same arguments, the same defaults."""

import inspect
from typing import Any

import pytest

import atoll
from atoll.client._async import files as async_files
from atoll.client._async import sandbox as async_sandbox
from atoll.client._async import tunnel as async_tunnel
from atoll.client._sync import files, sandbox, tunnel

PAIRS = [
    (sandbox.Sandbox, async_sandbox.AsyncSandbox),
    (sandbox.Command, async_sandbox.AsyncCommand),
    (sandbox.Pty, async_sandbox.AsyncPty),
    (files.Files, async_files.AsyncFiles),
    (tunnel.Tunnel, async_tunnel.AsyncTunnel),
]


def public(cls: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers_static(cls) if not name.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters."""
    inner = getattr(function, "__func__", function)
    return [(p.name, p.kind, p.default) for p in inspect.signature(inner).parameters.values()]


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_the_faces_are_the_same(blocking: type, asynchronous: type) -> None:
    one, other = public(blocking), public(asynchronous)
    assert one.keys() == other.keys()
    assert shape(blocking.__init__) == shape(asynchronous.__init__)
    for name in one:
        if callable(one[name]) or isinstance(one[name], classmethod):
            assert shape(one[name]) == shape(other[name]), name
            made = getattr(other[name], "__func__", other[name])
            assert inspect.iscoroutinefunction(made) or inspect.isasyncgenfunction(made), f"{name} must be async"


def test_the_public_names_are_these() -> None:
    assert atoll.__all__ == sorted(atoll.__all__)
    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
    with pytest.raises(AttributeError):
        _ = atoll.nothing  # type: ignore[attr-defined]


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(TypeError, match="memroy"):
        atoll.Sandbox(memroy=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="memroy"):
        atoll.AsyncSandbox(memroy=1)  # type: ignore[call-arg]
