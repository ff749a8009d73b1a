"""What a gateway would find in its namespace, without being one: for people who set it up, and for `atoll kubernetes`."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.backends.kubernetes import names
from atoll.backends.kubernetes.agents import Agents
from atoll.backends.kubernetes.api import CLAIMS, POOLS, RUNTIME_CLASSES, TEMPLATES, Cluster
from atoll.backends.kubernetes.channel import GatewayKey
from atoll.backends.kubernetes.claims import find_condition
from atoll.backends.kubernetes.cluster_checks import find_cluster_problems
from atoll.backends.kubernetes.pools import ADD_POOL, Pool, Pools
from atoll.backends.kubernetes.settings import Settings
from atoll.backends.kubernetes.templates import Problem
from atoll.backends.kubernetes.watching import Watch
from atoll.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class Claim:
    """A sandbox, as the cluster shows it."""

    sandbox: str
    runtime: str
    pool: str
    ready: str
    pod: str
    ours: bool  # made with this gateway's key


@dataclass(frozen=True, slots=True)
class Inspection:
    """The namespace as it is now."""

    server: str
    namespace: str
    problems: tuple[Problem, ...]
    pools: tuple[Pool, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)  # RuntimeClass: handler
    claims: tuple[Claim, ...] = ()


async def inspect(settings: Settings) -> Inspection:
    """Look at the cluster with the gateway's own credentials and key."""
    agents = Agents.load(settings.key_file)
    cluster = await Cluster.connect(settings.kubeconfig, settings.context, settings.namespace)
    try:
        server = ":".join(map(str, cluster.server))
        if problems := await find_cluster_problems(cluster):
            return Inspection(server, settings.namespace, tuple(problems))
        templates, objects = Watch(cluster, TEMPLATES), Watch(cluster, POOLS)
        await asyncio.gather(templates.read(), objects.read())
        pools = Pools(templates, objects, agents.public_key, settings.runtimes).all()
        classes = await cluster.list(RUNTIME_CLASSES)
        handlers = {one["metadata"]["name"]: str(one.get("handler", "")) for one in classes["items"]}
        found = [*_pool_problems(settings.namespace, pools, handlers)]
        claims = await _claims(cluster, agents.mark)
        return Inspection(server, settings.namespace, tuple(found), tuple(pools), handlers, tuple(claims))
    finally:
        await cluster.close()


def _pool_problems(namespace: str, pools: list[Pool], handlers: Mapping[str, str]) -> list[Problem]:
    if not pools:
        return [Problem(f"namespace {namespace}", "it has no pool", ADD_POOL)]
    found = [problem for pool in pools for problem in pool.problems]
    for pool in pools:
        if pool.runtime_class and pool.runtime_class not in handlers:
            what = f"its RuntimeClass {pool.runtime_class!r} does not exist"
            found.append(Problem(f"SandboxTemplate {namespace}/{pool.name}", what, "install the runtime on the nodes"))
    if not any(pool.default for pool in pools):
        found.append(Problem(f"namespace {namespace}", "no pool is the default", "set `default: true` for one pool"))
    return found


async def _claims(cluster: Cluster, mark: str) -> list[Claim]:
    found = await cluster.list(CLAIMS, labels=names.SANDBOX)
    return [
        Claim(
            one["metadata"]["labels"][names.SANDBOX],
            one["metadata"]["labels"].get(names.RUNTIME, ""),
            one["spec"]["warmPoolRef"]["name"],
            str(find_condition(one, "Ready").get("reason", "")),
            str(one.get("status", {}).get("sandbox", {}).get("name", "")),
            one["metadata"]["labels"].get(names.GATEWAY) == mark,
        )
        for one in found["items"]
    ]


def make_key(path: Path) -> str:
    """Write a gateway's new private key, which only its user can read, unless there is one; return its public half."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return GatewayKey.load(path).public
    except OSError as error:
        raise PermissionDenied(f"{path} cannot be written: {error.strerror}") from None
    key = GatewayKey.generate()
    try:
        with open(file, "wb") as writing:
            writing.write(key.to_pem())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return key.public
