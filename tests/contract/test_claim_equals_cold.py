"""A warm sandbox is the one a cold start would have made, for every field of BoxSpec.

The fields are read from the dataclass: a new one fails here until it has a value to be tried with.
"""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from lab.contract import ENV, Place, run
from lab.waiting import eventually

from atoll.backends.contract import Box, BoxSpec, Limits, Memory, Mount, Workspace
from atoll.model import Policy

SEEN = """
import json, os, resource, socket
def tried(path):
    try: open(path, 'w').close(); return 'written'
    except OSError as error: return error.errno
def size(path):
    stat = os.statvfs(path); return stat.f_blocks * stat.f_frsize
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
mounts = sorted(line.split()[1] for line in open('/proc/mounts'))
print(json.dumps({
    'env': sorted(f'{k}={v}' for k, v in os.environ.items()),
    'host': socket.gethostname(),
    'caps': [status[name].strip() for name in ('CapBnd', 'CapEff') if name in status],
    'seccomp': status.get('Seccomp', '').strip(),
    'nofile': resource.getrlimit(resource.RLIMIT_NOFILE),
    'nproc': resource.getrlimit(resource.RLIMIT_NPROC),
    'root': tried('/file'), 'etc': tried('/etc/file'),
    'shm': size('/dev/shm'), 'disk': size('/workspace'),
    'interfaces': len(socket.if_nameindex()), 'mounts': mounts,
}))
"""
# Two requests in which every field that a warm sandbox can have differs from its default.
TRIED: tuple[dict[str, Any], ...] = (
    {
        "limits": Limits(memory_mb=300, pids=90, files=512, disk_mb=80, shm_mb=70),
        "required": frozenset(["memory_mb", "pids"]),
        "boot": {"env": {**ENV, "COMMON": "1", "MINE": "1"}, "deadline_ms": 3_600_000},
        "base_env": {**ENV, "COMMON": "1"},
        "policy": Policy(network="hosts", hosts=("a.example",)),
    },
    {
        "required": frozenset(["disk_mb"]),
        "read_only_root": True,
        "seccomp": "restrictive",
        "no_capabilities": True,
    },
)
# A started sandbox cannot be given these: such a request is never served by a warm one.
COLD: dict[str, Any] = {
    "hostname": "of-its-own",
    "mounts": (Mount("/var/tmp", "/mnt/here", True, 0, 0),),
    "memory": Memory({"name": "a"}),
    "workspace": Workspace("shared", "a" * 20),
}
SAME = {"id", "image", "first", "runtime"}  # what a warm sandbox is looked for by


def test_every_field_is_tried() -> None:
    tried = {name for case in TRIED for name in case}
    assert tried | set(COLD) | SAME == {one.name for one in fields(BoxSpec)}


async def look(box: Box) -> dict[str, Any]:
    """All that can be told about a sandbox, from inside and from its facts, without its id."""
    code, output = await run(box, "/usr/bin/python3", "-c", SEEN)
    assert code == 0, output
    seen = json.loads(output.replace(box.id[:12], "ID"))
    facts = box.facts
    return {**seen, "limits": facts.limits, "enforced": facts.enforced, "runtime": facts.runtime}


@pytest.mark.parametrize("case", [0, 1])
async def test_BK09_a_claim_equals_a_cold_start(place: Place, case: int) -> None:
    """The warm one is made for another caller first, whose wishes must not show."""
    if not place.backend.warmth()["floor"]:
        pytest.skip("has no warm sandboxes")
    changes = TRIED[case]
    if "policy" in changes:
        await place.connected()
    backend, spec = place.backend, place.spec(**changes)
    cold = await look(await place.create(spec))
    left = {"env": {**spec.base_env, "LEFT": "behind"}, "deadline_ms": 1_000_000}
    others = spec.required & {"disk_mb"}
    backend.prewarm(replace(spec, boot=left, policy=Policy(), required=others))
    await eventually(lambda: backend.warm_for(spec) == 1, "one is warm")
    wanted = replace(spec, id=place.spec().id)
    reserved = backend.reserve(wanted)
    assert reserved != wanted.id
    assert await look(await place.create(replace(wanted, id=reserved))) == cold


async def test_BK09_what_a_started_sandbox_cannot_take_on_is_made_cold(place: Place) -> None:
    if not place.backend.warmth()["floor"]:
        pytest.skip("has no warm sandboxes")
    backend, spec = place.backend, place.spec()
    backend.prewarm(spec)
    await eventually(lambda: backend.warm_for(spec) == 1, "one is warm")
    kinds = {
        **COLD,
        "limits": replace(spec.limits, disk_mb=spec.limits.disk_mb + 16),
        "base_env": {**ENV, "OPERATOR": "changed it"},
        "read_only_root": True,
        "seccomp": "restrictive",
        "no_capabilities": True,
    }
    kept = Workspace("kept", disk={"id": "a" * 20})
    for name, value in (*kinds.items(), ("workspace", kept)):
        other = place.spec(**{name: value})
        assert backend.warm_for(other) == 0, name
        assert backend.reserve(other) == other.id, name
