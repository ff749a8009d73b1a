"""The digest of a create, and what an activation tells the agent."""

import hashlib
import hmac
import json
from typing import Any

from atoll.backends.contract import BoxSpec
from atoll.backends.local.kernel import filters


def digest_request(key: bytes, spec: BoxSpec, pool: str) -> str:
    """Return what tells two creates apart. Keyed, so that no value of the environment can be guessed from it."""
    said = {
        "id": spec.id,
        "pool": pool,
        "image": [spec.image.name, spec.image.digest],
        "runtime": spec.runtime,
        "limits": spec.limits.to_json(),
        "required": sorted(spec.required),
        "hostname": spec.hostname,
        "boot": dict(spec.boot),
        "base_env": dict(spec.base_env),
        "read_only_root": spec.read_only_root,
        "seccomp": spec.seccomp,
        "no_capabilities": spec.no_capabilities,
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def make_boot(spec: BoxSpec, secrets: tuple[str, str]) -> dict[str, Any]:
    """Return the boot message of an activation. The filter of system calls is the one of this machine's sandboxes."""
    host_secret, agent_secret = secrets
    files = spec.limits.files
    rlimits = {"nofile": [files, files], "core": [0, 0], **spec.boot.get("rlimits", {})}
    return {
        **spec.boot,
        "sandbox": spec.id,
        "host_secret": host_secret,
        "agent_secret": agent_secret,
        "rlimits": rlimits,
        "filter": filters.program(spec.seccomp).hex(),
    }
