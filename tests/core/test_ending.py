"""A destroy is answered when nothing of the sandbox runs any more; what it occupied goes right behind the answer."""

import asyncio
import os
from typing import Any

import pytest
from lab.daemon import DaemonProcess, until
from lab.plain_backend import PlainBackend

from atoll import errors
from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.core.sandboxes import lifecycle
from atoll.model import CreateSandbox

HERE = CreateSandbox(workdir="/tmp")


def test_no_process_is_left_when_destroy_answers(own_daemon: DaemonProcess) -> None:
    box = own_daemon.create()
    own_daemon.post(f"{box.path}/exec", {"command": "sleep 673", "background": True})
    pid = box.info()["pid"]
    held = os.pidfd_open(pid)
    try:
        assert own_daemon.delete(box.path)["state"] == "ended"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        os.close(held)
    until(lambda: not [p for p in (own_daemon.home / "boxes").iterdir() if p.name == box.id], "its disk is gone")


async def test_what_could_not_be_removed_is_tried_again(
    plain: Core, who: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = plain.backend
    assert isinstance(backend, PlainBackend)
    made = await plain.sandboxes.create(who, HERE)
    destroy, refused, removed = backend.destroy, [], asyncio.Event()

    async def reluctant(record: dict[str, Any], *, keep_disk: bool = False) -> None:
        if len(refused) < 2:
            refused.append(record["id"])
            raise errors.Internal("busy")
        await destroy(record, keep_disk=keep_disk)
        removed.set()

    monkeypatch.setattr(lifecycle, "REMOVE_AGAIN", (0.01, 0.01, 0.01))
    monkeypatch.setattr(backend, "destroy", reluctant)
    assert (await plain.sandboxes.destroy(who, made.id)).state == "ended"
    async with asyncio.timeout(30):
        await removed.wait()
    assert refused == [made.id] * 2
