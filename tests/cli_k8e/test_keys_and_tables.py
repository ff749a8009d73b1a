"""Keys from the command line under all their names, tables for people, and the benchmark."""

import os
import re

from .conftest import Gateway, Machine


def test_keys_are_made_listed_and_ended_under_all_names(gateway: Gateway) -> None:
    names = [f"k-{os.urandom(4).hex()}" for _ in range(3)]
    made = gateway.ok("key", "create", names[0], "--ttl", "25h", "--scopes", "use", "--quota", "sandboxes=2")
    assert re.fullmatch(r"[0-9a-f]{64}", made["key"]) and made["e2b_key"] == "e2b_" + made["key"]
    assert made["ttl_days"] == 2 and made["scopes"] == ["use"] and made["quotas"]["sandboxes"] == 2
    assert made["created_at"].endswith("Z") and made["expires_at"].endswith("Z")
    forever = gateway.ok("sandbox-apikey", "create", names[1], "--ttl", "never")
    assert forever["expires_at"] is None and forever["ttl_days"] is None
    assert gateway.ok("sandbox", "api-key", "create", names[2])["ttl_days"] == 30
    for words in (("key", "list"), ("sandbox-apikey", "list"), ("sandbox", "api-key", "list")):
        listed = {one["name"]: one for one in gateway.ok(*words)["keys"]}
        assert set(names) <= set(listed) and not listed[names[0]]["expired"]
        assert "expires_at" not in listed[names[1]] and not any("key" in one for one in listed.values())
    assert gateway.ok("key", "revoke", names[0]) == {"ok": True, "name": names[0]}
    assert gateway.ok("sandbox-apikey", "delete", names[1]) == {"ok": True, "name": names[1]}
    assert gateway.ok("sandbox", "api-key", "delete", names[2]) == {"ok": True, "name": names[2]}
    gone = gateway("sandbox", "api-key", "delete", names[2])
    assert gone.code == 1 and gone.json["error"] == "not_found"
    assert gateway("sandbox", "api-key", "create", "../x").json["error"] == "invalid_argument"
    assert gateway("sandbox", "api-key", "create", "x", "--ttl", "soon").json["error"] == "invalid_argument"
    assert gateway("sandbox", "api-key", "create", "x", "--quota", "cpus=many").json["error"] == "invalid_argument"


def test_a_revoked_key_is_refused_at_once(gateway: Gateway, bare: Machine) -> None:
    name = f"k-{os.urandom(4).hex()}"
    key = gateway.ok("key", "create", name)["key"]
    bare.env.update(K8E_SANDBOX_ENDPOINT=gateway.endpoint, K8E_SANDBOX_CERT=gateway.ca, K8E_SANDBOX_APIKEY=key)
    assert bare.ok("sandbox", "sessions")["sessions"] == []
    assert bare("sandbox", "api-key", "create", "mine").json["error"] == "permission_denied"
    gateway.ok("key", "revoke", name)
    assert bare("sandbox", "sessions").json["error"] == "unauthenticated"


def test_k8es_keys_can_be_taken_over(gateway: Gateway, bare: Machine) -> None:
    name, key = f"k-{os.urandom(4).hex()}", os.urandom(32).hex()
    assert gateway.ok("key", "import", "-", stdin=f'{{"{name}": "{key}"}}'.encode())["keys"][name]
    bare.env.update(K8E_SANDBOX_ENDPOINT=gateway.endpoint, K8E_SANDBOX_CERT=gateway.ca, K8E_SANDBOX_APIKEY=key)
    assert bare.ok("sandbox", "sessions")["sessions"] == []
    assert gateway("key", "import", "/nowhere/keys.json").code != 0
    gateway.ok("key", "revoke", name)


def test_people_see_tables_and_programs_json(gateway: Gateway) -> None:
    name = f"n-{os.urandom(4).hex()}"
    session = gateway.ok("sandbox", "create", "--name", name)["session_id"]
    try:
        for words in (("list",), ("sessions",), ("get", session), ("events", session), ("list", session)):
            assert gateway.ok("sandbox", *words)
            assert gateway.at_terminal("sandbox", *words, "--json")[1].lstrip().startswith("{")
        seen = gateway.at_terminal("sandbox", "list")[1]
        assert seen.splitlines()[0].split()[:3] == ["ID", "NAME", "PHASE"]
        assert re.search(rf"{session}\s+{name}\s+\x1b\[32mActive\s*\x1b\[0m", seen)
        gateway.env["NO_COLOR"] = "1"
        assert "\x1b" not in gateway.at_terminal("sandbox", "list")[1]
        shown = gateway.at_terminal("sandbox", "get", session)[1]
        assert re.search(r"^phase +Active$", shown, re.MULTILINE) and re.search(rf"^name +{name}$", shown, re.MULTILINE)
        assert "created" in gateway.at_terminal("sandbox", "events", session)[1]
        assert "no files" in gateway.at_terminal("sandbox", "list", session)[1]
    finally:
        gateway.env.pop("NO_COLOR", None)
        gateway.ok("sandbox", "destroy", session)


def test_a_hostile_name_cannot_steer_the_terminal(gateway: Gateway) -> None:
    session = gateway.ok("sandbox", "create")["session_id"]
    try:
        hostile = r"touch \"$(printf 'a\\033]0;x\\007b')\""
        gateway.ok("sandbox", "run", hostile.replace('\\"', '"'), "--session-id", session)
        seen = gateway.at_terminal("sandbox", "list", session)[1]
        assert "\x07" not in seen and "\x1b]" not in seen and "/workspace/a" in seen
    finally:
        gateway.ok("sandbox", "destroy", session)


def test_the_benchmark_tells_averages(gateway: Gateway) -> None:
    done = gateway("sandbox", "benchmark", "--pool-size", "1", "--iterations", "1")
    assert done.code == 0, done
    for kind in ("cold_", "warm_", "lifecycle_"):
        assert kind in done.stderr.decode() and any(name.startswith(kind) for name in done.json)
    assert done.json["pool_size"] == 1 and done.json["iterations"] == 1
    assert gateway("sandbox", "benchmark", "--pool-size", "0").json["error"] == "invalid_argument"
