"""The settings of the Kubernetes backend, as `[backend.kubernetes]` gives them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster, one namespace in it, and how long things may take. Times are in seconds."""

    key_file: Path  # Ed25519 private key of the gateway
    namespace: str = "sandbox-matrix"
    kubeconfig: str = ""
    context: str = ""
    lease_s: float = 3600.0  # a sandbox lives so long after the last gateway
    stopped_s: float = 30 * 86400.0  # the volume of a stopped sandbox outlives the last gateway so long
    start_s: float = 120.0  # a claim may take so long to become ready
    unreachable_s: float = 30.0  # an agent may be away so long
    canary_s: float = 60.0  # between two looks whether policies are enforced
    runtimes: Mapping[str, str] = field(default_factory=dict)  # runtime: RuntimeClass
