"""The operator's settings in force: limits, caps, allow-lists, images that are not here, isolation that cannot be had."""

import http.server
import json
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from lab.functions import Envelope, FunctionLab, until


def test_iii_D3_parallel_creates_stay_below_the_limit(own_fn: FunctionLab) -> None:
    """Never have more sandboxes than allowed, however many are asked for at once."""
    own_fn.configure(max_concurrent_sandboxes=3)
    count = 100 if os.environ.get("ATOLL_TEST_LONG") else 16

    def create(_: int) -> str:
        try:
            return str(own_fn.create(memory_mb=64)["sandbox_id"])
        except Envelope as refused:
            assert "max_concurrent_sandboxes" in refused.all["fix_note"]
            return refused.code

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(create, range(count)))
    made = [one for one in answers if one != "S400"]
    assert len(made) == 3 and len(own_fn("sandbox::list")["sandboxes"]) == 3
    own_fn("sandbox::stop", sandbox_id=made[0], wait=True)
    assert create(0) != "S400"


def test_iii_D12_caps_with_one_key(own_fn: FunctionLab) -> None:
    """Refuse what is above a cap, name it, and leave the other limit free."""
    own_fn.configure(per_image_caps={"python": {"max_memory_mb": 300}, "node": {"max_cpus": 1}})
    refused = own_fn.refused("sandbox::create", image="python", memory_mb=301)
    assert refused.code == "S400" and "300" in refused.all["fix_note"]
    assert own_fn.refused("sandbox::create", image="python").code == "S400"  # the default is above it too
    sandbox = own_fn.create(image="python", memory_mb=300, cpus=2)["sandbox_id"]
    assert own_fn("sandbox::list")["sandboxes"][0]["cpus"] == 2
    own_fn("sandbox::stop", sandbox_id=sandbox)
    assert own_fn.refused("sandbox::create", image="node", cpus=2).code == "S400"


def test_iii_exec_slots_and_longest_command(own_fn: FunctionLab) -> None:
    """Run as many commands at once as the operator allows, none for longer than he does."""
    own_fn.configure(max_concurrent_exec_per_sandbox=2, max_exec_timeout_ms=8000, legacy_error_prefix=True)
    sandbox = own_fn.create()["sandbox_id"]

    def code(_: int) -> str:
        _, answer = own_fn.ask("POST", "/functions/sandbox::exec", {"sandbox_id": sandbox, "cmd": "sleep 600"})
        text = answer["error"]["message"]
        assert text.startswith("handler error: {")
        return str(json.loads(text.removeprefix("handler error: "))["code"])

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(code, n) for n in range(2)]
        until(lambda: own_fn("sandbox::list")["sandboxes"][0]["exec_in_flight"] == 2, "two run")
        assert code(2) == "S003"
        assert [one.result(90) for one in both] == ["S200", "S200"]


def test_iii_Q16_Q17_custom_images_and_an_allow_list(own_fn: FunctionLab) -> None:
    """List custom images after presets, only the allowed; what is not here and may not be pulled is S101."""
    custom = {"zeta": "localhost:9/none/zeta:1", "alpha": "localhost:9/none/alpha:1"}
    own_fn.configure(custom_images=custom, image_allowlist=["zeta", "alpha", "python", "gone"], auto_install=False)
    images = own_fn("sandbox::catalog::list")["images"]
    assert [(one["name"], one["kind"]) for one in images] == [
        ("python", "preset"),
        ("alpha", "custom"),
        ("zeta", "custom"),
    ]
    assert images[1]["oci_ref"] == custom["alpha"]
    assert own_fn.refused("sandbox::create", image="alpha").code == "S101"
    for name in ("node", "gone", custom["alpha"]):
        assert own_fn.refused("sandbox::create", image=name).code == "S100"


def test_iii_S102_when_a_pull_fails(own_fn: FunctionLab) -> None:
    """Say that a pull failed and may be tried again; the place is free afterwards."""
    own_fn.configure(
        custom_images={"far": "localhost:9/none/far:1"}, image_allowlist=["far"], max_concurrent_sandboxes=1
    )
    for _ in range(2):
        refused = own_fn.refused("sandbox::create", image="far")
        assert refused.code == "S102" and refused.all["retryable"] is True
    assert own_fn("sandbox::list")["sandboxes"] == []


def test_iii_Q16_an_empty_list_denies_everything(own_fn: FunctionLab) -> None:
    """Boot nothing with an empty allow-list."""
    own_fn.configure(image_allowlist=[])
    assert own_fn("sandbox::catalog::list")["images"] == []
    assert own_fn.refused("sandbox::create", image="python").code == "S100"


def test_iii_Q15_isolation_that_cannot_boot_is_S300(own_fn: FunctionLab) -> None:
    """Refuse a named isolation this machine has not, with the reason, and leave nothing."""
    if not own_fn.works("microvm"):
        pytest.skip("microvm works here")
    own_fn.configure(isolation="microvm")
    refused = own_fn.refused("sandbox::create", image="python")
    assert refused.code == "S300" and "microvm" in refused.all["message"]
    assert own_fn("sandbox::list")["sandboxes"] == []


def test_iii_Q13_auto_takes_the_strongest(own_fn: FunctionLab) -> None:
    """Choose the strongest isolation that works and say which."""
    own_fn.configure(isolation="auto")
    strongest = next(name for name in ("gvisor", "container") if not own_fn.works(name))
    made = own_fn.create()
    assert made["isolation"] == strongest
    assert own_fn.sh(made["sandbox_id"], "echo hi; pwd")["stdout"] == "hi\n/root\n"
    own_fn.put(made["sandbox_id"], "/tmp/f", "x")
    assert own_fn.get(made["sandbox_id"], "/tmp/f") == "x"


def test_iii_without_a_file_the_presets_are_allowed(own_fn: FunctionLab) -> None:
    """Allow python and node where the operator has said nothing."""
    os.unlink(Path(own_fn.home) / "iii.yaml")
    images = own_fn("sandbox::catalog::list")["images"]
    assert [one["name"] for one in images] == ["python", "node"]


def test_iii_ended_ids_are_known_to_the_next_daemon(own_fn: FunctionLab) -> None:
    """Tell a stopped sandbox from an unknown one after a restart, and keep the living."""
    first, second = own_fn.create()["sandbox_id"], own_fn.create()["sandbox_id"]
    own_fn("sandbox::stop", sandbox_id=first, wait=True)
    own_fn.cli("daemon", "stop")
    until(lambda: not os.path.exists(f"{own_fn.home}/daemon.sock"), "it left")
    own_fn.start()
    assert own_fn.refused("sandbox::exec", sandbox_id=first, cmd="true").code == "S004"
    assert own_fn("sandbox::stop", sandbox_id=first)["stopped"] is True
    assert own_fn("sandbox::exec", sandbox_id=second, cmd="echo hi")["stdout"] == "hi\n"


def test_iii_D17_a_hungry_sandbox_is_bounded(own_fn: FunctionLab) -> None:
    """Bound a fork bomb and a disk fill; others do not notice."""
    other, hungry = own_fn.create()["sandbox_id"], own_fn.create()["sandbox_id"]
    full = own_fn.sh(hungry, "head -c 200000000 /dev/zero > /root/fill", timeout_ms=120_000)
    assert full["exit_code"] != 0 and "space" in full["stderr"]
    try:
        own_fn.sh(hungry, "b() { b | b & }; b; sleep 600", timeout_ms=3000)
    except Envelope as refused:
        assert refused.code in ("S200", "S300")
    assert own_fn.sh(other, "echo fine; head -c 1000000 /dev/zero > /root/f")["exit_code"] == 0
    own_fn("sandbox::stop", sandbox_id=hungry, wait=True)


def test_iii_guests_may_open_as_many_files_as_the_contract_says(own_fn: FunctionLab) -> None:
    """65536, or what the daemon itself may have where that is less."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = 65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)
    sandbox = own_fn.create()["sandbox_id"]
    assert own_fn.sh(sandbox, "ulimit -n")["stdout"].strip() == str(most)


def test_iii_insecure_registries_are_those_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speak plain HTTP to a registry that is not on loopback only when the variable names it, and then really do."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect(("192.0.2.1", 9))  # sends nothing; it chooses this machine's own address
        address = probe.getsockname()[0]
        server = http.server.ThreadingHTTPServer((address, 0), Registry)
    except OSError:
        pytest.skip("this machine has no address of its own")
    finally:
        probe.close()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"{address}:{server.server_port}"
    images = {"house": f"{place}/team/app:1"}
    try:
        for allowed, asked in (("", False), (f"elsewhere.example:5000, {place}", True)):
            monkeypatch.setenv("III_INSECURE_REGISTRIES", allowed)
            Registry.asked.clear()
            lab = FunctionLab({"custom_images": images, "image_allowlist": ["house"]})
            try:
                assert lab.refused("sandbox::create", image="house").code == "S102"
            finally:
                lab.close()
            assert bool(Registry.asked) is asked
    finally:
        server.shutdown()
        server.server_close()


class Registry(http.server.BaseHTTPRequestHandler):
    """Has nothing, and remembers that it was asked in plain words."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Quiet."""
