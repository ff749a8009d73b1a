"""The output of commands that the host keeps: how much there may be of it, and finding it again when a command has ended."""

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from atoll import accounts, errors
from atoll.accounts import MEMORY, OUTPUT
from atoll.core.commands.output import Held, Output
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.typed import CommandRow
from atoll.model import ExecResult, shown


class KeptOutputs:
    """The outputs of every command: in files for the background, in memory else, up to the caps of sandbox and owner."""

    def __init__(self, sandboxes: Sandboxes, directory: Path) -> None:
        self._sandboxes = sandboxes
        self._directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)
        sandboxes.forget_outputs = self._forget

    def begin(self, live: Live, command: str, kept: int, background: bool) -> Output:
        """Return a place for the output of a new command, `kept` bytes of each stream."""
        grant = self._grant(live.id, live.owner) if background else None
        held = None if background else self._held(live)
        return Output(kept, self._directory / live.id if background else None, command, grant, held)

    def find(self, sandbox: str, row: CommandRow) -> Output | None:
        """Return the output of a background command that ended some time ago; None when it is no longer kept."""
        directory = self._directory / sandbox
        if not row["exit"] or not (directory / f"{row['id']}.1").exists():
            return None
        output = Output(row["spec"].get("kept", 0), directory, row["id"])
        output.kept[1].total = max(output.kept[1].total, row["exit"].get("stdout_bytes", 0))
        output.kept[2].total = max(output.kept[2].total, row["exit"].get("stderr_bytes", 0))
        return output

    def count(self, sandbox: str, owner: str) -> None:
        """Charge what an earlier daemon kept; what is beyond the caps goes, the oldest first."""
        held = [(path, path.stat().st_size) for path in self._kept_files(sandbox)]
        for path, size in reversed(held):
            try:
                self._sandboxes.accounts.charge(OUTPUT, size, accounts.sandbox(sandbox), accounts.owner(owner))
            except errors.Exhausted:
                path.unlink(missing_ok=True)

    def _kept_files(self, sandbox: str) -> Iterable[Path]:
        """Oldest first."""
        with suppress(FileNotFoundError):
            found = [(entry.stat().st_mtime, entry.path) for entry in os.scandir(self._directory / sandbox)]
            return [Path(path) for _, path in sorted(found)]
        return []

    def _grant(self, sandbox: str, owner: str) -> Callable[[int], int]:
        """Asks for room for output. Output of commands that ended longest ago makes room; if that is not enough, it is cut."""
        holders = (accounts.sandbox(sandbox), accounts.owner(owner))

        def grant(wanted: int) -> int:
            if self._sandboxes.space.left_lately() < wanted:
                return 0
            while True:
                try:
                    self._sandboxes.accounts.charge(OUTPUT, wanted, *holders)
                    return wanted
                except errors.Exhausted:
                    if not self._drop_oldest(sandbox, holders):
                        return 0

        return grant

    def _held(self, live: Live) -> Held:
        """The account of one foreground command's output. What ended longest ago makes room for it."""
        holders = (accounts.sandbox(live.id), accounts.owner(live.owner))
        return Held(self._sandboxes.accounts.lease(MEMORY, 0, *holders), live.forget_oldest)

    def _drop_oldest(self, sandbox: str, holders: tuple[accounts.Holder, ...]) -> bool:
        """Remove the output of the command that ended longest ago; False when there is none."""
        live = next((live for live in self._sandboxes.live.values() if live.id == sandbox), None)
        running = {c.id for c in live.commands.values() if not c.ended} if live is not None else set()
        for path in self._kept_files(sandbox):
            size = path.stat().st_size
            if path.stem not in running and size:
                path.unlink(missing_ok=True)
                self._sandboxes.accounts.release(OUTPUT, size, *holders)
                return True
        return False

    def _forget(self, sandbox: str) -> None:
        shutil.rmtree(self._directory / sandbox, ignore_errors=True)


def result_of(sandbox: str, row: CommandRow, output: Output) -> ExecResult:
    """Return how a command ended that is known only by its row, with its output."""
    (stdout, stdout_b64), (stderr, stderr_b64) = shown(output.kept[1].first()), shown(output.kept[2].first())
    summary = row["exit"]
    assert summary is not None
    return ExecResult(
        command_id=row["id"],
        sandbox_id=sandbox,
        stdout=stdout,
        stderr=stderr,
        stdout_b64=stdout_b64,
        stderr_b64=stderr_b64,
        truncated=summary["stdout_truncated"] or summary["stderr_truncated"],
        **summary,
    )


def close(output: Output | None) -> None:
    """Close the files of an output that was found."""
    if output is not None:
        for kept in output.kept.values():
            kept.close()
