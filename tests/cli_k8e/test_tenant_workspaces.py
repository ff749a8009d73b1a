"""A tenant's workspace that lasts: it outlives idleness, pauses and the machine that made it, and ends with destroy."""

import secrets
import time

from .conftest import WAIT, Gateway, Machine


def phase(gateway: Gateway, session: str, wanted: str) -> None:
    until = time.monotonic() + WAIT
    while gateway.ok("sandbox", "get", session)["phase"] != wanted:
        assert time.monotonic() < until, f"{session} never was {wanted}"
        time.sleep(0.2)


def test_k8e_P10_a_persistent_workspace_waits_for_its_tenant(gateway: Gateway) -> None:
    tenant = f"t-{secrets.token_hex(4)}"
    flags = ("--tenant", tenant)
    first = gateway.ok("sandbox", "run", "echo kept > /workspace/f", *flags, "--persistent", "--idle-timeout", "3")
    session = first["session_id"]
    assert gateway.ok("sandbox", "get", session)["expires_at"] == 0, "it ends with destroy, not with the day"
    phase(gateway, session, "Paused")  # nobody used it
    again = gateway.ok("sandbox", "run", "cat /workspace/f", *flags)
    assert (again["stdout"], again["session_id"]) == ("kept\n", session)
    phase(gateway, session, "Paused")
    other = Machine()
    try:  # another machine, which has no state of that tenant
        far = {"ATOLL_ENDPOINT": f"unix:{gateway.root / 'a' / 'daemon.sock'}"}
        found = other.ok("sandbox", "run", "cat /workspace/f", *flags, env=far)
        assert (found["stdout"], found["session_id"]) == ("kept\n", session)
    finally:
        other.close()
    phase(gateway, session, "Paused")
    assert gateway.ok("sandbox", "destroy", *flags) == {"ok": True}
    fresh = gateway.ok("sandbox", "run", "ls /workspace", *flags)
    assert fresh["stdout"] == "" and fresh["session_id"] != session
    gateway.ok("sandbox", "destroy", *flags)


def test_k8e_P13_a_workspace_vanishes_with_its_session(gateway: Gateway) -> None:
    flags = ("--tenant", f"t-{secrets.token_hex(4)}")
    first = gateway.ok("sandbox", "run", "echo gone > /workspace/f", *flags)
    gateway.ok("sandbox", "destroy", first["session_id"])
    again = gateway.ok("sandbox", "run", "ls /workspace", *flags)
    assert again["stdout"] == "" and again["session_id"] != first["session_id"]
    gateway.ok("sandbox", "destroy", *flags)
