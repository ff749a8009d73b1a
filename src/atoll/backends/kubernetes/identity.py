"""Whether a sandbox is still the one that was activated, and how it ended if not."""

from typing import Any

from atoll.backends.contract import Ended
from atoll.backends.kubernetes import names
from atoll.backends.kubernetes.api import Object
from atoll.backends.kubernetes.claims import Identity

_SIGNALS = 128
_KILLED_BY = {9: "SIGKILL", 15: "SIGTERM"}


def find_end(known: Identity, claim: Object | None, sandbox: Object | None, pod: Object | None) -> Ended | None:
    """Return how the sandbox ended, from the objects that are there under its names; None: it has not.

    The container's own end is looked at first: it says most, and deletions follow it.
    """
    if pod is not None and pod["metadata"]["uid"] == known.pod_uid:
        if (ended := _container_end(pod)) is not None:
            return ended
        if "deletionTimestamp" in pod["metadata"]:
            return Ended("lost", f"pod {known.sandbox} on node {known.node} is being deleted")
    elif pod is not None:
        return Ended("lost", f"pod {known.sandbox} was replaced by another one")
    else:
        return Ended("lost", f"pod {known.sandbox} on node {known.node} is gone")
    if claim is None or claim["metadata"]["uid"] != known.claim_uid:
        return Ended("lost", f"its claim {known.claim} was deleted")
    if "deletionTimestamp" in claim["metadata"]:
        return Ended("lost", f"its claim {known.claim} is being deleted")
    if sandbox is None or sandbox["metadata"]["uid"] != known.sandbox_uid:
        return Ended("lost", f"the Sandbox {known.sandbox} below its claim was replaced")
    if claim.get("status", {}).get("sandbox", {}).get("name", known.sandbox) != known.sandbox:
        return Ended("lost", f"the cluster gave its claim {known.claim} another Sandbox")
    return None


def _container_end(pod: Object) -> Ended | None:
    status = pod.get("status", {})
    ended: dict[str, Any] = {}
    for one in status.get("containerStatuses", ()):
        if one.get("name") == names.CONTAINER:
            if one.get("restartCount"):
                return Ended("lost", "the container was started again")
            ended = one.get("state", {}).get("terminated", {})
    if not ended:
        if status.get("phase") in ("Failed", "Succeeded"):
            return Ended("lost", str(status.get("message") or status.get("reason") or "the pod ended"))
        return None
    code = int(ended.get("exitCode", 0))
    if ended.get("reason") == "OOMKilled":
        return Ended("oom", "out of memory: the pod was killed")
    if code > _SIGNALS:
        number = code - _SIGNALS
        return Ended("killed", f"killed by {_KILLED_BY.get(number, f'signal {number}')}")
    return Ended("exit", f"the agent exited with code {code}")
