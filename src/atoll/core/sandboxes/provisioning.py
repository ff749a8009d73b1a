"""From a request to a running box: every choice made once, a box started for it or taken from the pool, its agent awake."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from atoll import errors
from atoll.backends.contract import Backend, BoxSpec, First, Limits, Mount, Record, Workspace
from atoll.config import Config
from atoll.core.access.credentials import may
from atoll.core.access.principals import Principal
from atoll.core.policy import profiles
from atoll.core.policy.images import INTERPRETER, Chosen, Images
from atoll.core.policy.mounts import allowed_mounts
from atoll.core.policy.network import policy_of
from atoll.core.sandboxes.state import Live
from atoll.core.store.typed import SandboxRow
from atoll.model import CreateSandbox
from atoll.profiles import MODES

AGENT_GRACE_MS = 60_000  # the agent's own deadline comes this much after ours
WARM_MEMORY_MB, WARM_PIDS = 128, 32  # the least a sandbox must have to keep an interpreter waiting
NODE_MEMORY_MB, NODE_PIDS = 256, 128  # the same for a Node; the agent also looks at what is in use
FIRST = First(("/usr/bin/python3", "/usr/local/lib/atoll-interpreter/server.py", "--ready"), "user")
TEMPORARY = "ephemeral-"  # begins the name of a sandbox that lives for one command: for lists, not for inside


@dataclass(frozen=True, slots=True)
class Plan:
    """A request with its image, its limits (those in `required` were asked for and must be held) and its mounts."""

    spec: CreateSandbox
    image: Chosen
    limits: Limits
    required: frozenset[str]
    mounts: tuple[Mount, ...]
    base_env: Mapping[str, str]  # the image's and the operator's, without the caller's
    warm: Mapping[str, object]  # which interpreters are kept warm in it

    def box(
        self,
        sandbox: str,
        runtime: str,
        *,
        expires_at: float | None = None,
        parent: str | None = None,
        disk: Record | None = None,
    ) -> BoxSpec:
        spec, profile = self.spec, profiles.of(self.spec)
        return BoxSpec(
            id=sandbox,
            image=self.image.reference,
            runtime=runtime,
            limits=self.limits,
            required=self.required,
            hostname="" if (spec.name or "").startswith(TEMPORARY) else spec.name or "",
            boot={
                "env": {**self.base_env, **spec.env},
                "deadline_ms": agent_deadline(expires_at),
                "warm": self.warm,
            },
            base_env=self.base_env,
            mounts=self.mounts,
            workspace=_workspace(parent, disk),
            read_only_root=spec.read_only_root,
            seccomp=profile.seccomp,
            no_capabilities=profile.capabilities == "none",
            first=FIRST if self.image.name == INTERPRETER else None,
        )


class Boxes:
    """Makes boxes on one backend. What becomes of them afterwards is `lifecycle.py`'s."""

    def __init__(self, backend: Backend, images: Images, config: Config, home: Path) -> None:
        self._backend = backend
        self._images = images
        self._config = config
        self._home = home
        self.built: Callable[[Principal, str], str | None] = lambda who, name: (
            None
        )  # a built image's digest, by its name
        self.volumes: Callable[[Principal, CreateSandbox], tuple[Mount, ...]] = lambda who, spec: ()
        self._agents: dict[str, BoxSpec] = {}  # what a sandbox of each mode is made as

    async def runtime(self, asked: str) -> str:
        return await self._backend.pick(asked if asked != "auto" else self._config.sandboxes.runtime)

    async def plan(self, spec: CreateSandbox, who: Principal | None = None, digest: str | None = None) -> Plan:
        """`who` opens the mounts; without one there are none. `digest` is the image a stopped sandbox was made from."""
        asked = {key: value for key, value in msgspec.structs.asdict(spec.limits).items() if value is not None}
        defaults = profiles.default_limits(spec, msgspec.structs.asdict(self._config.limits))
        mounts = (*allowed_mounts(self._home, who, spec), *self.volumes(who, spec)) if who is not None else ()
        guest = who.owner if who is not None and not may(who, "admin") else None
        digest = digest or (self.built(who, spec.image) if who is not None else None)
        image = await self._images.choose(spec.image, spec.program, digest, guest)
        base_env = {**image.env, **self._config.sandboxes.env}
        limits = Limits.from_json({**defaults, **asked})
        if not limits.shm_mb:
            limits = replace(limits, shm_mb=max(1, limits.memory_mb // 2))
        return Plan(spec, image, limits, frozenset(asked), mounts, base_env, self._warm(limits))

    def _warm(self, limits: Limits) -> Mapping[str, object]:
        """In a sandbox with little room a waiting interpreter would be in the way."""
        warm = self._config.warm
        roomy = limits.memory_mb >= WARM_MEMORY_MB and limits.pids >= WARM_PIDS
        ample = limits.memory_mb >= NODE_MEMORY_MB and limits.pids >= NODE_PIDS
        return {
            "python": warm.python and roomy,
            "preload": warm.preload,
            "pool": warm.pool,
            "node": warm.node and ample,
            "node_pool": warm.node_pool,
            "memory_mb": limits.memory_mb,
        }

    async def prewarm(self, mode: str | None = None, count: int = 0) -> None:
        """Keep spares of the default sandbox, or of a mode's, from now on, at least so many."""
        runtime = await self.runtime("auto")
        plan = await self._plan_of(mode)
        self._backend.prewarm(plan.box("", runtime), count)
        for name in MODES:
            self._agents[name] = (await self._plan_of(name)).box("", runtime)

    async def _plan_of(self, mode: str | None) -> Plan:
        spec, _ = profiles.resolve(CreateSandbox(mode=mode))
        return await self.plan(spec)

    def warmth(self) -> Mapping[str, object]:
        """Return the pool, how many spares of each kind the operator wants, and those that fit each agent's mode."""
        agents = {name: self._backend.warm_for(spec) for name, spec in self._agents.items()}
        return {**self._backend.warmth(), "agents": agents}

    async def boot(self, row: SandboxRow, wanted: BoxSpec) -> Live:
        """The box of a row, with its policy in force, and an agent that answers."""
        box = await self._backend.create(replace(wanted, policy=policy_of(row["record"])))
        live = Live({**row, "state": "running"}, box)
        try:
            if live.spec.workdir != "/workspace":
                await _check_workdir(live)
        except BaseException:
            await live.client.close()
            raise
        return live


def _workspace(parent: str | None, disk: Record | None) -> Workspace:
    if parent is not None:
        return Workspace("shared", parent, disk)
    return Workspace() if disk is None else Workspace("kept", disk=disk)


async def _check_workdir(live: Live) -> None:
    answer = await live.client.request("stat", path=live.spec.workdir)
    stat = answer.get("stat")
    if not isinstance(stat, dict) or stat.get("type") != "directory":
        raise errors.NotADirectory(f"workdir {live.spec.workdir!r:.200} is not a directory")


def agent_deadline(expires_at: float | None) -> int | None:
    if expires_at is None:
        return None
    return max(1, int((expires_at - time.time()) * 1000)) + AGENT_GRACE_MS
