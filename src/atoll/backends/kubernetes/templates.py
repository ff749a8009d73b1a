"""Read a SandboxTemplate: what it says, and must say, of the sandboxes made from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from atoll.backends.kubernetes import names
from atoll.backends.kubernetes.api import Object
from atoll.backends.kubernetes.quantities import parse_mebibytes, parse_quantity

FORBIDDEN = frozenset(["ALL", "SYS_PTRACE", "SYS_ADMIN", "SYS_MODULE", "NET_ADMIN", "NET_RAW"])
WORKSPACE, SHARED_MEMORY = "/workspace", "/dev/shm"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the cluster that is not as it must be: the object, what is wrong, how it is mended."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


@dataclass(frozen=True, slots=True)
class PodLimits:
    """The limits the kubelet enforces on a pod of this template; None where there is none."""

    cpus: float | None
    memory_mb: int | None
    shm_mb: int | None


def find_container(pod: Object) -> Object:
    """Return the container of a pod's spec in which the agent is; an empty one if there is none."""
    found = [one for one in pod.get("containers", ()) if one.get("name") == names.CONTAINER]
    return found[0] if found else {}


def read_limits(template: Object) -> PodLimits:
    pod = _pod(template)
    container = find_container(pod)
    limits = container.get("resources", {}).get("limits", {})
    cpus, memory = limits.get("cpu"), limits.get("memory")
    return PodLimits(
        parse_quantity(cpus) if cpus is not None else None,
        parse_mebibytes(memory) if memory is not None else None,
        _shared_memory(pod, container),
    )


def has_volume(template: Object) -> bool:
    """Return whether /workspace is a volume that outlives a pod."""
    container = find_container(_pod(template))
    mounted = {one["name"] for one in container.get("volumeMounts", ()) if one.get("mountPath") == WORKSPACE}
    return any(one["metadata"]["name"] in mounted for one in template["spec"].get("volumeClaimTemplates") or ())


def find_problems(template: Object, gateway_key: str) -> list[Problem]:
    """Return everything that keeps this template from being used; empty if it is as it must be."""
    where = f"SandboxTemplate {template['metadata']['namespace']}/{template['metadata']['name']}"
    found = [*_pod_problems(_pod(template), gateway_key), *_policy_problems(template["spec"])]
    return [Problem(where, what, fix) for what, fix in found]


Finding = tuple[str, str]


def _pod_problems(pod: Object, gateway_key: str) -> Iterable[Finding]:
    wanted: dict[str, tuple[Any, ...]] = {
        "restartPolicy": ("Never",),
        "automountServiceAccountToken": (None, False),
        "shareProcessNamespace": (None, False),
        "hostNetwork": (None, False),
        "hostPID": (None, False),
        "hostIPC": (None, False),
        "dnsPolicy": ("None",),
    }
    for key, allowed in wanted.items():
        if pod.get(key) not in allowed:
            yield f"{key} is {pod.get(key)!r}", f"set podTemplate.spec.{key} to {allowed[-1]!r}"
    if pod.get("dnsConfig", {}).get("nameservers") != ["127.0.0.1"]:
        yield "names are not resolved by the agent", "set dnsConfig.nameservers to [127.0.0.1]"
    if any("hostPath" in volume for volume in pod.get("volumes", ())):
        yield "it mounts a directory of the node", "remove hostPath volumes"
    if len(pod.get("containers", ())) != 1:
        yield "it has other containers beside the sandbox", "leave one container"
    container = find_container(pod)
    if not container:
        yield f"it has no container {names.CONTAINER}", "render it with the chart"
        return
    yield from _container_problems(container, gateway_key)


def _container_problems(container: Object, gateway_key: str) -> Iterable[Finding]:
    security = container.get("securityContext", {})
    if security.get("privileged"):
        yield "its container is privileged", "set privileged to false"
    if "ALL" not in security.get("capabilities", {}).get("drop", ()):
        yield "its container keeps NET_RAW and others", "drop ALL capabilities and add what is needed"
    if added := FORBIDDEN & set(security.get("capabilities", {}).get("add", ())):
        yield f"its container has {', '.join(sorted(added))}", "remove these capabilities"
    words = [*container.get("command", ()), *container.get("args", ())]
    if words[1:2] != ["pod"]:
        yield "its first process is not the agent", "render it with the chart"
    elif gateway_key not in words:
        yield "it does not name this gateway's key", f"add the argument --gateway-key {gateway_key}"


def _policy_problems(spec: Object) -> Iterable[Finding]:
    if spec.get("networkPolicyManagement", "Managed") != "Managed":
        yield "its network policy is not managed", "set networkPolicyManagement to Managed"
    policy = spec.get("networkPolicy")
    if policy is None:
        yield "it has no network policy, and so may reach the internet", "set networkPolicy.egress to []"
        return
    if policy.get("egress"):
        yield "its pods have a way out", "set networkPolicy.egress to []"
    rules = policy.get("ingress", [])
    ports = [rule.get("ports") for rule in rules]
    if not rules or any(not rule.get("from") for rule in rules) or any(not _agent_only(one) for one in ports):
        yield (
            "its pods can be reached by others than the gateway, or not at all",
            f"allow ingress to port {names.AGENT_PORT} from the gateway alone",
        )


def _agent_only(ports: Any) -> bool:
    return bool(ports) and all(one.get("port") == names.AGENT_PORT for one in ports)


def _pod(template: Object) -> Object:
    pod: Object = template["spec"]["podTemplate"]["spec"]
    return pod


def _shared_memory(pod: Object, container: Object) -> int | None:
    """Return the size of the volume at /dev/shm."""
    named = [one["name"] for one in container.get("volumeMounts", ()) if one.get("mountPath") == SHARED_MEMORY]
    for volume in pod.get("volumes", ()):
        directory = volume.get("emptyDir") or {}
        if volume.get("name") in named and directory.get("medium") == "Memory" and "sizeLimit" in directory:
            return parse_mebibytes(directory["sizeLimit"])
    return None
