"""LIF-03: the network's walls stand until the last process is gone."""

import asyncio
from pathlib import Path

import pytest
from lab.sandboxes import PATIENCE

from atoll.config import Config
from atoll.core import Core
from atoll.core.access.principals import local
from atoll.model import CreateSandbox, ExecSpec, LimitsSpec
from atoll.server.daemon import local_backend, local_images

STUBBORN = "trap '' TERM INT HUP; for i in 1 2 3 4 5 6 7 8; do (setsid sh -c 'while :; do :; done' &); done; while :; do :; done"


@pytest.mark.parametrize("way", ["destroy", "stop"])
async def test_links_go_only_when_no_process_is_left(way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A real sandbox with processes that ignore every signal: when its link is taken down, its group is empty."""
    import os
    import shutil
    import tempfile

    if os.geteuid() != 0:
        pytest.skip("needs root")
    home = Path(tempfile.mkdtemp(prefix="atb-"))
    settings = Config()
    core = Core(home, local_backend(home), local_images(home, settings), settings)
    await core.start()
    who = local(os.geteuid(), os.getegid())
    seen: list[list[int]] = []
    detach = core.backend.links.detach  # type: ignore[attr-defined]

    async def watched(sandbox: str) -> None:
        seen.append(sorted(core.backend.groups.open(sandbox).pids()) if sandbox in core.backend.groups.names() else [])  # type: ignore[attr-defined]
        await detach(sandbox)

    core.backend.links.detach = watched  # type: ignore[attr-defined]
    try:
        async with asyncio.timeout(2 * PATIENCE):
            info = await core.sandboxes.create(
                who, CreateSandbox(runtime="container", limits=LimitsSpec(memory_mb=256, pids=64, disk_mb=64))
            )
            await core.commands.background(who, info.id, ExecSpec(command=STUBBORN))
            assert core.backend.groups.open(info.id).pids()  # type: ignore[attr-defined]  # control: there is somebody
            await (core.sandboxes.destroy(who, info.id) if way == "destroy" else core.sandboxes.stop(who, info.id))
            assert seen and all(pids == [] for pids in seen), seen
            await core.sandboxes.destroy(who, info.id)
    finally:
        core.backend.links.detach = detach  # type: ignore[attr-defined]
        await core.close()
        shutil.rmtree(home, ignore_errors=True)
