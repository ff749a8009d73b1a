"""Snapshots, checkpoints, sub-agents and approvals of an `AsyncSandbox`.

The blocking face is generated from this one (scripts/unasync.py).
"""

import builtins
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, Unpack

from .. import calls
from ..options import CreateOptions, check_create
from .driver import AsyncLink

if TYPE_CHECKING:
    from ..wire import CheckpointWire, SnapshotWire

Where = tuple[str | None, str | None, str | None]


class AsyncWorkspaces:
    """Mixed into `AsyncSandbox`, which has a target and knows where its daemon is."""

    _where: Where
    _link: AsyncLink

    def __init__(self, *, home: str | None = None, endpoint: str | None = None, api_key: str | None = None) -> None: ...

    async def _target(self) -> tuple[str, AsyncLink]:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def _other(self, ref: str) -> Self:
        """Another sandbox at the same daemon, ours to destroy."""
        home, endpoint, api_key = self._where
        other = type(self)(home=home, endpoint=endpoint, api_key=api_key)
        other._ref = ref  # type: ignore[attr-defined]
        return other

    async def snapshot(self, name: str, *, full: bool = False, force: bool = False) -> "SnapshotWire":
        """Keep its files under a name, and return what is known of the snapshot.

        Args:
            name: of the snapshot.
            full: also keep what was changed outside /workspace.
            force: replace a snapshot of that name.
        """
        ref, link = await self._target()
        found: SnapshotWire = await link.call(calls.save_snapshot(ref, name, full=full, force=force))
        return found

    @classmethod
    async def restore(
        cls,
        snapshot: str,
        *,
        home: str | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> Self:
        """Create a sandbox with a snapshot's files and return it, running.

        Args:
            snapshot: its name.
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
            options: as for `create`.
        """
        check_create(options)
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key)
        made = await sandbox._link.call(calls.restore_snapshot(snapshot, options))
        sandbox._ref = str(made["id"])  # type: ignore[attr-defined]
        return sandbox

    @classmethod
    async def snapshots(
        cls, *, home: str | None = None, endpoint: str | None = None, api_key: str | None = None
    ) -> "builtins.list[SnapshotWire]":
        """Return the caller's snapshots, oldest first.

        Args:
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
        """
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key)
        try:
            found: builtins.list[SnapshotWire] = (await sandbox._link.call(calls.get("/v1/snapshots")))["snapshots"]
            return found
        finally:
            await sandbox.close()

    @classmethod
    async def delete_snapshot(
        cls, name: str, *, home: str | None = None, endpoint: str | None = None, api_key: str | None = None
    ) -> None:
        """Delete a snapshot and the content only it has.

        Args:
            name: of the snapshot.
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
        """
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key)
        try:
            await sandbox._link.call(calls.delete_snapshot(name))
        finally:
            await sandbox.close()

    async def checkpoint(self, name: str | None = None, *, force: bool = False) -> "CheckpointWire":
        """Keep its memory, processes and disk of this moment under a name, and return what is known of the checkpoint.

        It goes on afterwards. Only runtimes that can save memory do; the others raise `Unsupported`.

        Args:
            name: of the checkpoint. None: one is chosen.
            force: replace a checkpoint of that name.
        """
        ref, link = await self._target()
        found: CheckpointWire = await link.call(calls.save_checkpoint(ref, name, force=force))
        return found

    async def fork(self, count: int = 1) -> "builtins.list[Self]":
        """Create sandboxes that go on from this moment of this one, all or none, and return them.

        Args:
            count: how many, at most 32.
        """
        ref, link = await self._target()
        made = await link.call(calls.fork(ref, count))
        return [self._other(str(one["id"])) for one in made["sandboxes"]]

    @classmethod
    async def from_checkpoint(
        cls,
        checkpoint: str,
        *,
        name: str | None = None,
        lifetime: float | None = None,
        network: bool = True,
        home: str | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
    ) -> Self:
        """Create a sandbox that goes on from a checkpoint and return it, running.

        Args:
            checkpoint: its name.
            name: a name for the sandbox.
            lifetime: seconds after which it ends. None: the default.
            network: False leaves it without a network.
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
        """
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key)
        call = calls.restore_checkpoint(checkpoint, name=name, lifetime=lifetime, network=network)
        made = await sandbox._link.call(call)
        sandbox._ref = str(made["id"])  # type: ignore[attr-defined]
        return sandbox

    @classmethod
    async def checkpoints(
        cls, *, home: str | None = None, endpoint: str | None = None, api_key: str | None = None
    ) -> "builtins.list[CheckpointWire]":
        """Return the caller's checkpoints, oldest first.

        Args:
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
        """
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key)
        try:
            answer = await sandbox._link.call(calls.get("/v1/checkpoints"))
            found: builtins.list[CheckpointWire] = answer["checkpoints"]
            return found
        finally:
            await sandbox.close()

    @classmethod
    async def delete_checkpoint(
        cls, name: str, *, home: str | None = None, endpoint: str | None = None, api_key: str | None = None
    ) -> None:
        """Delete a checkpoint. Sandboxes made from it go on.

        Args:
            name: of the checkpoint.
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
        """
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key)
        try:
            await sandbox._link.call(calls.Call("DELETE", calls.checkpoint_path(name)))
        finally:
            await sandbox.close()

    async def subagent(
        self,
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        hosts: Sequence[str] | None = None,
        cpus: float | None = None,
        memory_mb: int | None = None,
        pids: int | None = None,
    ) -> Self:
        """Create a sandbox beside this one on the same /workspace and return it. It may never do more than this one, and ends with it.

        Args:
            name: a name of its own.
            env: environment of every command.
            hosts: the hosts it may reach, among those of this one. None: the same.
            cpus: processors. None: as this one.
            memory_mb: memory. None: as this one.
            pids: processes and threads. None: as this one.
        """
        ref, link = await self._target()
        limits = {"cpus": cpus, "memory_mb": memory_mb, "pids": pids}
        made = await link.call(calls.subagent(ref, name=name, env=env, hosts=hosts, limits=limits))
        return self._other(str(made["id"]))

    async def confirm(self, action: str, *, timeout: float = 30.0) -> bool:
        """Ask a person to approve an action, wait, and return whether it was approved in time.

        Args:
            action: what the person is shown.
            timeout: seconds to wait.
        """
        ref, link = await self._target()
        asked = await link.call(calls.ask_approval(ref, action))
        found = await link.call(calls.wait_approval(asked["id"], timeout))
        return bool(found["status"] == "approved")
