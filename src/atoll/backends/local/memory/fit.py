"""What has to be equal where a memory was saved and where it is started from. A difference refuses; nothing is tried."""

import hashlib
import platform
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from atoll.backends.contract import BoxSpec
from atoll.backends.local import binaries
from atoll.errors import FailedPrecondition

FORM = "1"  # of the record and of the files of a saved memory
_SHOWN = {
    "form": "the form of saved memories",
    "engine": "the engine",
    "version": "the engine's version",
    "agent": "the guest agent",
    "cpu": "the processor",
    "kernel": "the kernel",
    "image": "the image",
    "seccomp": "the filter of system calls",
    "rights": "the capabilities",
    "root": "whether the root can be written",
    "limits": "the limits",
}


def of_engine(name: str, program: str) -> dict[str, str]:
    """What this machine, its kernel, the agent and an engine are; the programs by their digests."""
    guest, engine = binaries.guest(), Path(program)
    stat, its = guest.stat(), engine.stat()
    return {
        "engine": name,
        "version": _digest(engine, its.st_mtime_ns, its.st_size),
        "form": FORM,
        "agent": _digest(guest, stat.st_mtime_ns, stat.st_size),
        "cpu": _processor(),
        "kernel": platform.release(),
    }


def of_spec(spec: BoxSpec) -> dict[str, str]:
    """What of a sandbox is fixed in its memory."""
    limits = spec.limits.to_json()
    return {
        "image": spec.image.digest,
        "seccomp": spec.seccomp,
        "rights": str(spec.no_capabilities),
        "root": str(spec.read_only_root),
        "limits": ",".join(f"{name}={limits[name]:g}" for name in sorted(limits)),
    }


def check(saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """FailedPrecondition that names what differs."""
    differs = sorted(name for name in {*saved, *here} if saved.get(name) != here.get(name))
    if differs:
        first = differs[0]
        raise FailedPrecondition(
            f"this memory was saved elsewhere or under other rules: {', '.join(_SHOWN.get(name, name) for name in differs)} differ",
            hint="start it where it was saved, or make the sandbox anew",
            details={"differs": differs, "saved": saved.get(first, ""), "here": here.get(first, "")},
        )


@lru_cache(maxsize=4)
def _digest(program: Path, changed: int, size: int) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()


@cache
def _processor() -> str:
    """The first processor's model and features; all of a machine are taken to be alike."""
    model, flags = "", ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and not model:
            model = value.strip()
        if name.strip() in ("flags", "Features") and not flags:
            flags = " ".join(sorted(value.split()))
    return f"{model}, features {hashlib.sha256(flags.encode()).hexdigest()[:16]}"
