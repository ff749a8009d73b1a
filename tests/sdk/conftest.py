"""Real sandboxes through both faces of the SDK: every behaviour test runs on Sandbox and on AsyncSandbox.

`Bridge` makes an AsyncSandbox look blocking by running each call on one event loop, so that a test is written once.
"""

import asyncio
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.sandboxes import CONTAINER

import atoll
from atoll.client._async import files as async_files
from atoll.client._async import sandbox as async_sandbox
from atoll.client._async import terminals as async_terminals
from atoll.client._async import tunnel as async_tunnel

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(atoll.__file__)))
FACES = (async_sandbox.AsyncSandbox, async_sandbox.AsyncCommand, async_terminals.AsyncPty, async_files.AsyncFiles,
         async_tunnel.AsyncTunnel)  # fmt: skip


class Bridge:
    """An object of the asyncio face, called like one of the blocking face."""

    def __init__(self, inner: Any, runner: "asyncio.Runner") -> None:
        self._inner = inner
        self._runner = runner

    def _wrap(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            return self._wrap(self._runner.run(value))
        if isinstance(value, FACES):
            return Bridge(value, self._runner)
        if hasattr(value, "__anext__"):
            return self._iterate(value)
        return value

    def _iterate(self, items: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._runner.run(_awaited(items.__anext__()))
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(items.aclose())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return self._wrap(found)
        return lambda *args, **options: self._wrap(found(*args, **options))

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._inner.__aiter__())

    def __enter__(self) -> "Bridge":
        self._runner.run(self._inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._inner.__aexit__(None, None, None))


async def _awaited(item: Any) -> Any:
    return await item


@pytest.fixture(scope="session")
def home() -> Iterator[str]:
    """The home of a daemon for the SDK's tests."""
    made = tempfile.mkdtemp(prefix="ats-")
    (Path(made) / "config.toml").write_text(CONTAINER)
    env = {**os.environ, "ATOLL_HOME": made, "PYTHONPATH": SOURCE}
    try:
        yield made
    finally:
        subprocess.run(
            [sys.executable, "-m", "atoll", "daemon", "stop", "--force"], env=env, timeout=180, capture_output=True
        )
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


class Face:
    """One of the two classes, with the home filled in."""

    def __init__(self, name: str, home: str, runner: asyncio.Runner) -> None:
        self.name = name
        self._home = home
        self._runner = runner

    def __call__(self, **options: Any) -> Any:
        options.setdefault("home", self._home)
        if self.name == "blocking":
            return atoll.Sandbox(**options)
        return Bridge(atoll.AsyncSandbox(**options), self._runner)

    def __getattr__(self, name: str) -> Any:
        if self.name == "blocking":
            found = getattr(atoll.Sandbox, name)
        else:
            found = getattr(Bridge(atoll.AsyncSandbox, self._runner), name)
        return lambda *args, **options: found(*args, **{"home": self._home, **options})


@pytest.fixture(scope="session", params=["blocking", "asyncio"])
def face(request: pytest.FixtureRequest, home: str, runner: asyncio.Runner) -> Face:
    return Face(request.param, home, runner)


@pytest.fixture(scope="module")
def sandbox(face: Face) -> Iterator[Any]:
    with face(memory_mb=512) as made:
        yield made
