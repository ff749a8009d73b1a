"""Names of objects, labels and annotations (docs/kubernetes.md). They are hard to change later."""

import re

from atoll.errors import InvalidArgument

DOMAIN = "atoll.dev"
# Labels and annotations of templates.
RUNTIME = f"{DOMAIN}/runtime"
IMAGE = f"{DOMAIN}/image"
DEFAULT = f"{DOMAIN}/default"
# Labels and annotations of claims.
GATEWAY = f"{DOMAIN}/gateway"
SANDBOX = f"{DOMAIN}/sandbox"
REQUEST = f"{DOMAIN}/request"
POD = f"{DOMAIN}/pod"
FINGERPRINT = f"{DOMAIN}/fingerprint"
STOPPED = f"{DOMAIN}/stopped"
# Names that agent-sandbox chose.
CLAIM_UID = "agents.x-k8s.io/claim-uid"
NAME_HASH = "agents.x-k8s.io/sandbox-name-hash"
LAUNCH_TYPE = "agents.x-k8s.io/launch-type"

CONTAINER = "sandbox"  # of the pod; the agent is its first process
AGENT_PORT = 2024
_ID = re.compile(r"[a-z2-7]{20}")
_PREFIX = "atoll-"


def claim_name(sandbox: str) -> str:
    """Return the name of a sandbox's claim; an id of another form is refused."""
    if not _ID.fullmatch(sandbox):
        raise InvalidArgument(f"not a sandbox id: {sandbox[:64]!r}")
    return _PREFIX + sandbox


def sandbox_of(claim: str) -> str:
    """Return the sandbox's id of a claim's name; nothing if the name is not ours."""
    sandbox = claim.removeprefix(_PREFIX)
    return sandbox if claim.startswith(_PREFIX) and _ID.fullmatch(sandbox) else ""
