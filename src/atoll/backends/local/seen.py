"""The size of the machine as programs inside see it: the limits of the sandbox that this host holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.backends.contract import Limits
from atoll.backends.local.kernel.cgroups import Group


@dataclass(frozen=True, slots=True)
class Seen:
    """Sizes, and control groups to be read."""

    cpus: int  # 0 where the machine's are seen
    memory: int  # in bytes; 0 where the machine's is seen
    groups: tuple[tuple[str, str], ...] = ()  # of each that is shown, its name and where it is

    @staticmethod
    def all_of(limits: Limits) -> "Seen":
        """For a kernel of the sandbox's own, which holds them itself."""
        return Seen(math.ceil(limits.cpus), limits.memory_mb << 20)

    @staticmethod
    def held_by(group: Group, limits: Limits) -> "Seen":
        """For programs under the machine's kernel."""
        whole, held = Seen.all_of(limits), group.held()
        groups = tuple(group.shown().items())
        return Seen(whole.cpus if "cpu" in held else 0, whole.memory if "memory" in held else 0, groups)

    def to_json(self) -> Mapping[str, object]:
        """As the launcher's order has it."""
        groups = [{"name": name, "path": path} for name, path in self.groups]
        return {"cpus": self.cpus, "memory": self.memory, "groups": groups}
