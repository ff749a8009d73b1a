"""ESC-12: configuration of the runtime that an image or a request brings along (CVE-2025-24965)."""

import json
import os
import shutil
from pathlib import Path

import pytest
from lab.sandboxes import Lab

from atoll.backends.contract import BoxSpec, Image, Limits
from atoll.backends.local import LocalBackend
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.paths import new_id
from atoll.errors import FileNotFound
from atoll.guest.process import Process

PLANTED = {
    "ociVersion": "1.0.2",
    "process": {"args": ["/evil"], "user": {"uid": 0, "gid": 0}, "capabilities": {"effective": ["CAP_SYS_ADMIN"]}},
    "hooks": {"prestart": [{"path": "/evil"}]},
    "annotations": {"run.oci.handler": "wasm", "io.katacontainers.config.hypervisor.path": "/evil"},
    "mounts": [{"destination": "/host", "source": "/", "type": "bind", "options": ["rbind"]}],
}


@pytest.mark.parametrize("isolation", ["container", "gvisor"])
async def test_planted_files_have_no_effect(tmp_path: Path, isolation: str) -> None:
    """Every name a runtime might read, at the root of an image; the sandbox starts as if none of them were there."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if isolation == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("no runsc")
    image = tmp_path / "image"
    for place in (
        "config.json",
        "rootfs/config.json",
        "etc/oci/config.json",
        ".krun_vm.json",
        "boot.json",
        "etc/containers/oci/hooks.d/x.json",
    ):
        (image / place).parent.mkdir(parents=True, exist_ok=True)
        (image / place).write_text(json.dumps(PLANTED))
    (image / ".atoll").mkdir()
    (image / ".atoll" / "guest").write_text("#!/evil\n")

    async def layers(_: Image) -> Rootfs:
        return Rootfs((str(image),))

    backend = LocalBackend(tmp_path / "home", layers=layers, engines=[os.environ.get("ATOLL_TEST_ENGINE") or "auto"])
    await backend.start()
    try:
        box = await backend.create(BoxSpec(new_id(), Image("evil"), runtime=isolation, limits=Limits(disk_mb=16)))
        client = box.client
        try:
            process = await Process.start(client, "x", {"argv": ["/.atoll/guest", "--version"], "cwd": "/"})
            async for _ in process:
                pass
            assert process.exit is not None and process.exit.code in (0, 2)  # our agent ran, not what was planted
            with pytest.raises(FileNotFound):
                await client.request("stat", path=b"/host")
            pids = backend.groups.open(box.id).pids()
            assert box.record["pid"] in pids
            for pid in pids:
                assert " /host " not in Path(f"/proc/{pid}/mountinfo").read_text()
                status = Path(f"/proc/{pid}/status").read_text()
                assert not int(status.split("CapEff:\t")[1].split()[0], 16) & (1 << 21)
        finally:
            await client.close()
            await backend.destroy(box.record)
    finally:
        await backend.close()


@pytest.mark.parametrize(
    "field",
    ["annotations", "hooks", "privileged", "devices", "capabilities", "seccomp", "runtime_config", "oci", "user_ns"],
)
def test_unknown_fields_are_refused(lab: Lab, field: str) -> None:
    """Nothing is dropped silently: the request fails and names the field."""
    lab.start()
    status, answer = lab.ask("POST", "/v1/sandboxes", {field: {"a": "b"}})
    assert status == 400 and field in json.dumps(answer), answer
