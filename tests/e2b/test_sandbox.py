"""The class Sandbox of the stock Python SDK: everything that is the control plane's."""

import time
from datetime import datetime
from typing import Any

import e2b
import pytest
from e2b import AuthenticationException, NotFoundException, Sandbox, SandboxException, SandboxQuery
from lab.e2b import Door, env_key, new_key
from lab.waiting import until


def test_a_sandbox_is_as_it_was_asked_for(box: Any) -> None:
    info = box.get_info()
    assert info.sandbox_id == box.sandbox_id and info.template_id == "base" and info.metadata == {"who": "tests"}
    assert info.state == e2b.SandboxState.RUNNING and 500 < (info.end_at - info.started_at).total_seconds() <= 601
    assert info.cpu_count >= 1 and info.memory_mb >= 128
    assert box.is_running() and box.traffic_access_token
    assert box.get_host(3000) == f"3000-{box.sandbox_id}.{box.sandbox_domain}"


def test_its_life_can_be_changed(door: Door, box: Any) -> None:
    box.set_timeout(900)
    assert 600 < (box.get_info().end_at.timestamp() - time.time()) <= 900
    same = Sandbox.connect(box.sandbox_id, timeout=10, **door.options)
    assert same.sandbox_id == box.sandbox_id, "connecting never makes it end sooner"
    assert (box.get_info().end_at.timestamp() - time.time()) > 600
    assert same.commands.run("echo $FOO").stdout == "bar\n"


def test_metrics_and_logs(door: Door, box: Any) -> None:
    found = box.get_metrics()
    assert found and found[-1].mem_total > 0 and found[-1].cpu_count >= 1 and found[-1].disk_total > 0
    status, many, _ = door.ask("GET", f"/sandboxes/metrics?sandbox_ids={box.sandbox_id},nobody")
    assert status == 200 and list(many["sandboxes"]) == [box.sandbox_id]
    status, told, _ = door.ask("GET", f"/v2/sandboxes/{box.sandbox_id}/logs?limit=5")
    assert status == 200 and any("created" in entry["message"] for entry in told["logs"])


def test_lists_have_pages_order_and_filters(door: Door) -> None:
    mark = f"{time.time()} & =?%+ü"
    made = [Sandbox.create(timeout=120, metadata={"mark": mark, "n": str(n)}, **door.options) for n in range(3)]
    try:
        ids = [one.sandbox_id for one in made]
        query = SandboxQuery(metadata={"mark": mark})
        pages = Sandbox.list(query=query, limit=2, **door.options)
        assert [one.sandbox_id for one in pages.next_items()] == ids[:0:-1] and pages.has_next
        assert [one.sandbox_id for one in pages.next_items()] == ids[:1] and not pages.has_next
        rising = Sandbox.list(query=query, order="asc", **door.options)
        assert [one.sandbox_id for one in rising.next_items()] == ids
        one = Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "n": "1"}), **door.options).next_items()
        assert [found.sandbox_id for found in one] == [ids[1]]
        paused = SandboxQuery(metadata={"mark": mark}, state=[e2b.SandboxState.PAUSED])
        assert Sandbox.list(query=paused, **door.options).next_items() == []
        assert door.ask("GET", "/sandboxes")[1][0]["sandboxID"] == ids[-1]
        other = new_key(door.lab)
        assert Sandbox.list(**{**door.options, "api_key": other}).next_items() == []
        assert Sandbox.kill(ids[0], **{**door.options, "api_key": other}) is False
        with pytest.raises(NotFoundException):
            Sandbox.connect(ids[0], **{**door.options, "api_key": other})
    finally:
        assert [one.kill() for one in made] == [True] * 3
        assert made[0].kill() is False and not made[0].is_running()


def test_pause_keeps_what_runs_and_resume_goes_on(door: Door) -> None:
    box = Sandbox.create(timeout=120, **door.options)
    try:
        left = box.commands.run("sleep 1000", background=True)
        box.files.write("kept", "before")
        assert box.pause() is True and box.pause() is False
        assert not box.is_running()
        assert box.get_info().state == e2b.SandboxState.PAUSED
        with pytest.raises(SandboxException):
            box.commands.run("true")
        box.connect(timeout=60)
        assert box.is_running() and box.files.read("kept") == "before"
        assert [one.pid for one in box.commands.list()] == [left.pid], "it was frozen, not ended"
        assert box.pause(keep_memory=False) is True
        assert box.get_info().state == e2b.SandboxState.PAUSED
        box.connect(timeout=60)
        assert box.files.read("kept") == "before" and box.commands.list() == [], "only the disk was kept"
    finally:
        assert box.kill() is True


def test_at_the_end_of_its_time_it_is_killed_or_paused(door: Door) -> None:
    box = Sandbox.create(timeout=120, **door.options)
    kept = Sandbox.create(timeout=120, lifecycle={"on_timeout": "pause", "auto_resume": True}, **door.options)
    try:
        shown = door.ask("GET", f"/sandboxes/{kept.sandbox_id}")[1]["lifecycle"]
        assert shown == {"onTimeout": "pause", "autoResume": True}
        box.set_timeout(1)
        kept.set_timeout(1)
        until(lambda: not box.is_running() and not kept.is_running(), "both have reached their end")
        with pytest.raises(NotFoundException):
            box.get_info()
        assert kept.get_info().state == e2b.SandboxState.PAUSED
        assert kept.commands.run("echo again").stdout == "again\n", "a request with its token thaws it"
    finally:
        box.kill()
        assert kept.kill() is True


def test_a_command_of_a_killed_sandbox_says_what_happened(door: Door) -> None:
    box = Sandbox.create(timeout=120, **door.options)
    running = box.commands.run("sleep 1000", background=True)
    watching = box.files.watch_dir("/tmp")
    assert box.kill() is True
    with pytest.raises(SandboxException) as told:
        running.wait()
    assert "killed or reached its end of life" in str(told.value)
    with pytest.raises(SandboxException):
        watching.get_new_events()
    with pytest.raises(SandboxException):
        box.files.read("x")


def test_the_network_is_what_was_asked_for(door: Door) -> None:
    box = Sandbox.create(timeout=120, allow_internet_access=False, **door.options)
    try:
        assert box.get_info().allow_internet_access is False
        box.update_network({"allow_out": ["example.com"], "deny_out": ["0.0.0.0/0"]})
        shown = door.ask("GET", f"/sandboxes/{box.sandbox_id}")[1]
        assert shown["network"] == {"allowOut": ["example.com"], "denyOut": ["0.0.0.0/0"]}
        for wrong in ({"deny_out": ["10.0.0.0/8"]}, {"allow_out": ["example.com"]}, {"allow_out": ["1.2.3.4"]}):
            with pytest.raises(SandboxException) as refused:
                box.update_network(wrong)
            assert refused.value.status_code == 400
    finally:
        box.kill()


def test_a_key_makes_a_create_the_same_once(door: Door) -> None:
    name = f"once-{time.time_ns()}"
    first = Sandbox.create(timeout=60, idempotency_key=name, **door.options)
    try:
        again = Sandbox.create(timeout=60, idempotency_key=name, **door.options)
        assert again.sandbox_id == first.sandbox_id
        status, told, _ = door.ask(
            "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 61}, headers={"Idempotency-Key": name}
        )
        assert status == 422 and told["error_code"] == "idempotency_request_mismatch"
    finally:
        first.kill()


def test_both_generations_of_create(door: Door) -> None:
    for path, seconds in (("/sandboxes", 15), ("/v2/sandboxes", 300)):
        status, made, _ = door.ask("POST", path, {"templateID": "base"})
        assert status == 201 and made["domain"] and made["envdAccessToken"], made
        found = door.ask("GET", f"/sandboxes/{made['sandboxID']}")[1]
        start, end = (datetime.fromisoformat(found[name]) for name in ("startedAt", "endAt"))
        assert seconds - 1 <= (end - start).total_seconds() <= seconds + 1
        assert door.ask("DELETE", f"/sandboxes/{made['sandboxID']}")[0] == 204


def test_keys_are_checked(door: Door, box: Any) -> None:
    for key in ("", "e2b_" + "0" * 64, "nonsense"):
        status, told, _ = door.ask("GET", "/v2/sandboxes", key=key)
        assert status == 401 and told["code"] == 401 and told["message"]
    with pytest.raises(AuthenticationException):
        Sandbox.create(**{**door.options, "api_key": "e2b_" + "f" * 64})


def test_snapshots_of_files(door: Door) -> None:
    box = Sandbox.create(timeout=120, **door.options)
    name = f"kept-{time.time_ns()}"
    try:
        box.files.write("notes/one", "first")
        box.files.write("/opt/two", "second", user="root")
        made = box.create_snapshot(name, mode="filesystem")
        assert made.snapshot_id == f"{name}:default"
        assert [one.snapshot_id for one in box.list_snapshots().next_items()] == [made.snapshot_id]
        copy = Sandbox.create(made.snapshot_id, timeout=120, **door.options)
        try:
            assert copy.sandbox_id != box.sandbox_id and copy._envd_access_token != box._envd_access_token
            assert copy.files.read("notes/one") == "first" and copy.files.read("/opt/two") == "second"
            assert copy.files.get_info("notes/one").owner == "user"
        finally:
            copy.kill()
        other = {**door.options, "api_key": new_key(door.lab)}
        assert Sandbox.delete_snapshot(made.snapshot_id, **other) is False, "another's is not there"
        with pytest.raises(SandboxException) as refused:
            Sandbox.create(made.snapshot_id, **other)
        assert refused.value.status_code == 404
        assert Sandbox.delete_snapshot(made.snapshot_id, **door.options) is True
        assert Sandbox.delete_snapshot(made.snapshot_id, **door.options) is False
        with pytest.raises(SandboxException) as refused:
            box.create_snapshot()
        assert refused.value.status_code == 501, "memory is not kept, and nobody is told it is"
    finally:
        box.kill()


def test_what_is_not_here_says_so(door: Door, box: Any) -> None:
    with pytest.raises(SandboxException) as refused:
        box.fork()
    assert refused.value.status_code == 501
    with pytest.raises(SandboxException) as refused:
        Sandbox.create("no-such-template", **door.options)
    assert refused.value.status_code == 404


def test_the_lines_to_export(door: Door) -> None:
    lines = env_key(door.lab, door.port)
    assert set(lines) == {"E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN"}
    assert door.ask("GET", "/v2/sandboxes", key=lines["E2B_API_KEY"])[:2] == (200, [])
