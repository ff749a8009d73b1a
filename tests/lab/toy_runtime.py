"""A runtime that only the contract tests know. A new one takes such a file, and a line in the registry to be found by name."""

from typing import Any

from atoll.backends.contract import Capabilities
from atoll.backends.local.box import LocalBox
from atoll.backends.local.runtimes.base import Runtime
from atoll.backends.local.runtimes.container import OutsideAssembly


class ToyAssembly(OutsideAssembly):
    """By runc, which is told to be quiet about it."""

    def order(self, stage: str, descriptors: int) -> dict[str, Any]:
        usual = super().order(stage, descriptors)
        program, *words = usual["argv"]
        return {**usual, "argv": [program, "--log-format", "json", *words]}

    def boot(self) -> dict[str, Any]:
        return {**super().boot(), "deadline_ms": self.spec.boot.get("deadline_ms")}


class Toy(Runtime):
    """Sleeps when nobody uses it, changes no limit while it runs, and has no mounts and no shared workspace."""

    name = "toy"
    engines = ("runc",)
    fix = "install the package runc"
    capabilities = Capabilities(freezes_idle=True, policy="broker")
    assembly = ToyAssembly
    box = LocalBox
