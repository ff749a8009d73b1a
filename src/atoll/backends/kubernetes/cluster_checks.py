"""Check what a cluster must have before any sandbox can start in it."""

from atoll.backends.kubernetes.api import CLAIMS, Cluster
from atoll.backends.kubernetes.templates import Problem
from atoll.errors import AtollError

GROUPS = ("agents.x-k8s.io", "extensions.agents.x-k8s.io")
VERSION = "v1beta1"
INSTALL = "install the agent-sandbox controller 1.0 with its extensions"


async def find_cluster_problems(cluster: Cluster) -> list[Problem]:
    """Return what is missing: the versions of the custom resources, and the rights on claims."""
    found = []
    for group in GROUPS:
        versions = await cluster.versions(group)
        if not versions:
            found.append(Problem(f"API group {group}", "is not served", INSTALL))
        elif VERSION not in versions:
            found.append(Problem(f"API group {group}", f"is served as {', '.join(versions)}", INSTALL))
        elif len(versions) > 1:
            others = ", ".join(sorted(set(versions) - {VERSION}))
            fix = "remove the old custom resource definitions"
            found.append(Problem(f"API group {group}", f"is also served as {others}", fix))
    if found:
        return found
    try:
        await cluster.list(CLAIMS)
    except AtollError as error:
        found.append(Problem(f"namespace {cluster.namespace}", error.message, error.hint))
    return found
