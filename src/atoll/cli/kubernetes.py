"""`kubernetes install|status|doctor`: what an operator does in front of a cluster, with the settings of the gateway.

They need no daemon: the gateway may run elsewhere, or not yet.
"""

from __future__ import annotations

import os

from ..errors import FailedPrecondition
from .output import print_json, safe, tell, write
from .tables import coloured, for_people, record, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from ..backends.kubernetes.inspection import Inspection
    from ..backends.kubernetes.settings import Settings
    from .grammar import Arguments

RELEASE = "atoll"


def install(arguments: Arguments) -> int:
    """Run helm in place of this program; it tells how it went."""
    import json
    import shutil

    from ..backends.kubernetes.inspection import make_key

    settings = _settings()
    helm = shutil.which("helm")
    if helm is None:
        raise FailedPrecondition("helm is not installed", hint="https://helm.sh/docs/intro/install")
    key = make_key(settings.key_file)
    words = ["template"] if arguments.values.get("print") else ["upgrade", "--install", "--create-namespace"]
    words += [RELEASE, str(_chart()), "--namespace", settings.namespace]
    for file in arguments.rest:
        words += ["--values", file]
    words += ["--set-json", f"gateway.keys={json.dumps([key])}"]
    if arguments.agent_image:
        words += ["--set-string", f"agent.image={arguments.agent_image}"]
    if settings.kubeconfig:
        words += ["--kubeconfig", settings.kubeconfig]
    if settings.context:
        words += ["--kube-context", settings.context]
    os.execv(helm, [helm, *words])


def status(arguments: Arguments) -> int:
    found = _inspect()
    if not for_people(arguments):
        print_json(_as_json(found))
        return 0
    record((("server", found.server), ("namespace", found.namespace), ("problems", len(found.problems) or "none")))
    rows = [
        (pool.name, pool.runtime, pool.image, f"{pool.ready}/{pool.replicas}", "yes" if pool.volume else "no")
        for pool in found.pools
    ]
    write(1, b"\n")
    table(("POOL", "RUNTIME", "IMAGE", "WARM", "VOLUME"), rows, "no pools")
    write(1, b"\n")
    claims = [(one.sandbox, one.runtime, one.pool, one.ready, one.pod) for one in found.claims if one.ours]
    table(("SANDBOX", "RUNTIME", "POOL", "STATE", "POD"), claims, "no sandboxes")
    return 0


def doctor(arguments: Arguments) -> int:
    found = _inspect()
    if arguments.json:
        print_json({"ok": not found.problems, **_as_json(found)})
        return 1 if found.problems else 0
    for problem in found.problems:
        write(1, (coloured("FAIL") + safe(f"  {problem.where}: {problem.what}\n")).encode("utf-8", "replace"))
        tell(f"      fix: {problem.fix}")
    tell(f"{len(found.problems)} problem(s)." if found.problems else "The cluster can be used as it is.")
    return 1 if found.problems else 0


def _as_json(found: Inspection) -> dict[str, object]:
    return {
        "server": found.server,
        "namespace": found.namespace,
        "problems": [{"where": one.where, "what": one.what, "fix": one.fix} for one in found.problems],
        "pools": [
            {
                "name": pool.name,
                "runtime": pool.runtime,
                "runtime_class": pool.runtime_class,
                "image": pool.image,
                "default": pool.default,
                "volume": pool.volume,
                "ready": pool.ready,
                "replicas": pool.replicas,
            }
            for pool in found.pools
        ],
        "runtime_classes": dict(found.classes),
        "sandboxes": [
            {"id": one.sandbox, "runtime": one.runtime, "pool": one.pool, "state": one.ready, "pod": one.pod}
            for one in found.claims
            if one.ours
        ],
    }


def _inspect() -> Inspection:
    import asyncio

    from ..backends.kubernetes.inspection import inspect

    return asyncio.run(inspect(_settings()))


def _settings() -> Settings:
    from pathlib import Path

    from ..backends.kubernetes.settings import Settings
    from ..client.spawn import home_directory
    from ..config import load

    home = Path(home_directory())
    chosen = load(home).backend.kubernetes
    return Settings(
        key_file=Path(chosen.key_file) if chosen.key_file else home / "kubernetes.key",
        namespace=chosen.namespace,
        kubeconfig=chosen.kubeconfig,
        context=chosen.context,
        runtimes=chosen.runtimes,
    )


def _chart() -> Path:
    """Return the chart: of the installed package, or of the source tree it runs from."""
    from pathlib import Path

    package = Path(__file__).resolve().parents[1]
    for place in (package / "setup" / "helm" / "atoll", package.parents[1] / "deploy" / "helm" / "atoll"):
        if (place / "Chart.yaml").exists():
            return place
    raise FailedPrecondition("this installation has no chart", hint="install atoll from its wheel or source")
