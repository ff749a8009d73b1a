"""Speaks with the engine of a running gVisor sandbox: hold still, go on, write the memory to files.

The engine's program runs inside the sandbox's own namespaces, as its root: that is where its state and its socket are.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from atoll.backends.local import binaries
from atoll.backends.local.box import LocalRecord
from atoll.errors import AtollError, Internal, Timeout, Unsupported

TIMEOUT = 600.0  # for a memory of many gigabytes on a slow disk
_SAID = 2000


@dataclass(frozen=True, slots=True)
class Runsc:
    """The engine of one sandbox."""

    program: str
    state: str
    keeper: int
    sandbox: str

    @staticmethod
    def of(record: LocalRecord) -> "Runsc":
        return Runsc(record["program"], record["state"], record["pid"], record["id"])

    async def do(self, verb: str) -> None:
        """Pause or resume everything inside."""
        await self._run(verb, self.sandbox)

    async def checkpoint(self, directory: Path) -> None:
        """Write memory and processes to this directory, and leave everything as it is."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # By descriptor: the sandbox's root may not pass through the directories above.
            await self._run(
                "checkpoint", f"--image-path=/proc/self/fd/{fd}", "--leave-running", self.sandbox, fds=(fd,)
            )
        finally:
            os.close(fd)

    async def _run(self, *words: str, fds: tuple[int, ...] = ()) -> None:
        enter = binaries.system("nsenter")
        if enter is None:
            raise Unsupported("nsenter is not there", hint="install the package util-linux")
        process = await asyncio.create_subprocess_exec(
            *(enter, "-t", str(self.keeper), "-U", "-m", "-p", "-S", "0", "-G", "0", "--"),
            *(self.program, f"--root={self.state}", "--ignore-cgroups", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=fds,
            cwd="/",
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        try:
            async with asyncio.timeout(TIMEOUT):
                _, said = await process.communicate()
        except TimeoutError:
            raise Timeout(f"gVisor did not {words[0]} the sandbox within {TIMEOUT:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise _failure(words[0], said.decode(errors="replace").strip()[-_SAID:])


def _failure(verb: str, said: str) -> AtollError:
    if "not supported" in said:
        return Unsupported(
            f"this build of gVisor cannot {verb} a sandbox: {said}",
            hint="install gVisor of September 2026 or later: scripts/install-runsc.sh",
        )
    return Internal(f"gVisor could not {verb} the sandbox: {said}")
