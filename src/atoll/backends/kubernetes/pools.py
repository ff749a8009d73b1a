"""The warm pools of the namespace: which sandboxes each serves, and which one a create takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.backends.contract import BoxSpec, Limits
from atoll.backends.kubernetes import names
from atoll.backends.kubernetes.api import Object
from atoll.backends.kubernetes.templates import PodLimits, Problem, find_problems, has_volume, read_limits
from atoll.backends.kubernetes.watching import Watch
from atoll.errors import FailedPrecondition, NotFound, Unsupported

HOST = "host"  # the image of the default pool
ADD_POOL = "add a pool to the chart's `pools`; `kubectl get sandboxtemplates -L atoll.dev/runtime` lists them"


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool with its template."""

    name: str
    runtime: str
    image: str
    default: bool
    runtime_class: str
    limits: PodLimits
    volume: bool  # its sandboxes can be stopped and started again
    ready: int
    replicas: int
    problems: tuple[Problem, ...]

    def serves(self, image: str) -> bool:
        return image == self.image or (self.default and image in ("", HOST))

    def holds(self, limits: Limits) -> dict[str, bool]:
        """Return of each limit whether a sandbox of this pool is held to exactly this value."""
        pod = self.limits
        return {
            "cpus": pod.cpus == limits.cpus,
            "memory_mb": pod.memory_mb == limits.memory_mb,
            "pids": False,  # the node's limit for every pod is what holds
            "files": True,  # by the agent
            "disk_mb": False,  # the kubelet evicts a pod some time after it was too large
            "shm_mb": pod.shm_mb == limits.shm_mb,
        }


class Pools:
    """All pools, as they are now."""

    def __init__(self, templates: Watch, pools: Watch, gateway_key: str, classes: Mapping[str, str]) -> None:
        self._templates = templates
        self._pools = pools
        self._gateway_key = gateway_key
        self._classes = classes

    def all(self) -> list[Pool]:
        found = []
        for pool in self._pools.all():
            template = self._templates.get(pool["spec"].get("sandboxTemplateRef", {}).get("name", ""))
            if template is not None and names.RUNTIME in template["metadata"].get("labels", {}):
                found.append(self._read(pool, template))
        return sorted(found, key=lambda one: one.name)

    def get(self, name: str) -> Pool | None:
        return next((pool for pool in self.all() if pool.name == name), None)

    def of_runtime(self, runtime: str) -> list[Pool]:
        return [pool for pool in self.all() if pool.runtime == runtime]

    def choose(self, spec: BoxSpec, runtime: str) -> Pool:
        """Return the pool for a create, or raise what is missing."""
        there = self.of_runtime(runtime)
        if not there:
            raise Unsupported(f"no pool has the runtime {runtime}", hint=ADD_POOL)
        fitting = [pool for pool in there if pool.serves(spec.image.name)]
        if not fitting:
            known = ", ".join(sorted({pool.image for pool in there}))
            raise NotFound(
                f"no pool with the runtime {runtime} has the image {spec.image.name!r}",
                hint=f"use one of {known}, or {ADD_POOL}",
            )
        usable = [pool for pool in fitting if not pool.problems]
        if not usable:
            problem = fitting[0].problems[0]
            raise FailedPrecondition(f"{problem.where}: {problem.what}", hint=problem.fix)
        holding = [pool for pool in usable if all(pool.holds(spec.limits).get(name) for name in spec.required)]
        if not holding:
            raise Unsupported(_not_held(usable, spec), hint=ADD_POOL)
        return min(holding, key=lambda pool: _distance(pool.limits, spec.limits))

    def _read(self, pool: Object, template: Object) -> Pool:
        notes = template["metadata"].get("annotations", {})
        runtime = template["metadata"]["labels"][names.RUNTIME]
        runtime_class = template["spec"]["podTemplate"]["spec"].get("runtimeClassName", "")
        problems = find_problems(template, self._gateway_key)
        wanted = self._classes.get(runtime)
        if wanted is not None and runtime_class != wanted:
            where = f"SandboxTemplate {template['metadata']['name']}"
            problems.append(Problem(where, f"its class is {runtime_class!r}", f"the runtime is mapped to {wanted!r}"))
        return Pool(
            pool["metadata"]["name"],
            runtime,
            notes.get(names.IMAGE, ""),
            notes.get(names.DEFAULT) == "true",
            runtime_class,
            read_limits(template),
            has_volume(template),
            int(pool.get("status", {}).get("readyReplicas", 0)),
            int(pool["spec"].get("replicas", 1)),
            tuple(problems),
        )


def _not_held(pools: list[Pool], spec: BoxSpec) -> str:
    wanted = spec.limits.to_json()
    asked = ", ".join(f"{name}={wanted.get(name, '?')}" for name in sorted(spec.required))
    sizes = ", ".join(f"{pool.name} (cpus={pool.limits.cpus:g}, memory_mb={pool.limits.memory_mb})"
                      for pool in pools if pool.limits.cpus is not None)  # fmt: skip
    return f"no pool holds {asked}; there are {sizes or 'none with limits'}"


def _distance(pod: PodLimits, asked: Limits) -> tuple[bool, float]:
    """Order pools: those large enough first, the smallest of them first; then the largest of the others."""
    memory, cpus = pod.memory_mb or 0, pod.cpus or 0.0
    small = memory < asked.memory_mb or cpus < asked.cpus
    size = memory + 1024 * cpus
    return (small, -size if small else size)
