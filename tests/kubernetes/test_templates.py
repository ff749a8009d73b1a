"""A template that would make unsafe sandboxes is found, named and explained before any is made. Needs no cluster."""

import copy
from typing import Any

import pytest

from atoll.backends.kubernetes.quantities import parse_mebibytes, parse_quantity
from atoll.backends.kubernetes.templates import PodLimits, find_problems, read_limits

KEY = "A" * 43 + "="
GOOD: dict[str, Any] = {
    "metadata": {"namespace": "sandbox-matrix", "name": "python"},
    "spec": {
        "networkPolicy": {
            "egress": [],
            "ingress": [{"from": [{"ipBlock": {"cidr": "192.0.2.1/32"}}], "ports": [{"port": 2024}]}],
        },
        "podTemplate": {
            "spec": {
                "restartPolicy": "Never",
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["127.0.0.1"]},
                "containers": [
                    {
                        "name": "sandbox",
                        "command": ["/.atoll/guest", "pod", "--gateway-key", KEY],
                        "securityContext": {"capabilities": {"drop": ["ALL"], "add": ["SETUID"]}},
                        "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}},
                        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                    }
                ],
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}],
            }
        },
    },
}
POD = ("podTemplate", "spec")
BOX = (*POD, "containers", 0)
BROKEN: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "restarts": ((*POD, "restartPolicy"), "Always", "restartPolicy"),
    "token": ((*POD, "automountServiceAccountToken"), True, "automountServiceAccountToken"),
    "node's network": ((*POD, "hostNetwork"), True, "hostNetwork"),
    "cluster's names": ((*POD, "dnsConfig"), {}, "nameservers"),
    "node's files": ((*POD, "volumes", 0), {"name": "v", "hostPath": {"path": "/"}}, "hostPath"),
    "no agent": ((*BOX, "command"), ["/bin/sh"], "agent"),
    "another key": ((*BOX, "command", 3), "B" * 43 + "=", KEY),
    "privileged": ((*BOX, "securityContext", "privileged"), True, "privileged"),
    "traces": ((*BOX, "securityContext", "capabilities", "add"), ["SYS_PTRACE"], "SYS_PTRACE"),
    "raw packets": ((*BOX, "securityContext", "capabilities", "drop"), [], "NET_RAW"),
    "no policy": (("networkPolicy",), None, "internet"),
    "way out": (("networkPolicy", "egress"), [{}], "way out"),
    "open to all": (("networkPolicy", "ingress"), [{"ports": [{"port": 2024}]}], "reached by others"),
    "other ports": (("networkPolicy", "ingress", 0, "ports"), [{"port": 22}], "reached by others"),
    "unmanaged": (("networkPolicyManagement",), "Unmanaged", "not managed"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unsafe_template_is_named_with_its_fix(name: str) -> None:
    path, value, said = BROKEN[name]
    template = copy.deepcopy(GOOD)
    assert find_problems(template, KEY) == []
    place = template["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    problems = find_problems(template, KEY)
    assert problems and any(said in str(problem) for problem in problems)
    assert all(problem.where == "SandboxTemplate sandbox-matrix/python" and problem.fix for problem in problems)


def test_limits_are_read_from_the_template() -> None:
    assert read_limits(GOOD) == PodLimits(0.5, 1024, 64)


def test_quantities_are_read_as_kubernetes_writes_them() -> None:
    assert [parse_quantity(text) for text in ("250m", "2", "1k", "1.5", "x", "1Zi")] == [0.25, 2, 1000, 1.5, None, None]
    assert [parse_mebibytes(text) for text in ("512Mi", "1Gi", "1000000", "?")] == [512, 1024, 0, None]
