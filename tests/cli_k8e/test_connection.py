"""`connect`, `login`, profiles, `doctor --fix`: what they write, what they leave alone, and how they fail."""

import json
import os
import stat
from pathlib import Path

import pytest
import yaml

from .conftest import Done, Gateway, Machine

QUIET = ("--skip-skill", "--skip-path")


def connected(machine: Machine, gateway: Gateway, key: str, *flags: str) -> Done:
    env = {"K8E_SANDBOX_CERT": gateway.ca, "K8E_SANDBOX_APIKEY": key}
    done = machine("sandbox", "connect", "--endpoint", gateway.endpoint, *flags, env=env)
    assert done.code == 0 and done.stdout == b"", done
    return done


def test_connect_leaves_a_machine_that_needs_no_settings(gateway: Gateway, key: str, bare: Machine) -> None:
    said = connected(bare, gateway, key, "--agent", "claude").stderr
    settings = json.loads((bare.data / "config.json").read_text())
    assert settings == {"mode": "remote", "endpoint": gateway.endpoint, "agents": ["claude"]}
    profiles = yaml.safe_load((bare.data / "profiles.yaml").read_text())
    assert profiles["version"] == 1 and profiles["current_profile"] == "default"
    assert profiles["profiles"]["default"]["endpoint"] == gateway.endpoint
    for name in ("config.json", "profiles.yaml", "client.key"):
        assert stat.S_IMODE((bare.data / name).stat().st_mode) == 0o600
    assert all(key.encode() not in path.read_bytes() for path in bare.root.rglob("*") if path.is_file())
    home = Path(bare.env["HOME"])
    assert (home / ".claude/skills/k8e-sandbox/SKILL.md").exists()
    assert (bare.data / "skills/k8e-sandbox/SKILL.md").exists()
    link = home / ".local/bin/k8e-sandbox-cli"
    assert link.is_symlink() != (b"no link" in said) and str(link).encode() in said
    made = bare.ok("sandbox", "run", "echo certified")
    assert made["stdout"] == "certified\n"
    bare.ok("sandbox", "destroy", made["session_id"])


def test_connect_without_anything_is_the_local_daemon(bare: Machine) -> None:
    done = bare("sandbox", "connect", *QUIET)
    assert done.code == 0 and done.stdout == b"", done
    assert json.loads((bare.data / "config.json").read_text()) == {"mode": "local"}
    assert bare.ok("sandbox", "status")["available"] is True
    assert bare("sandbox", "connect", "--apikey", "k" * 64, *QUIET).json["error"] == "invalid_argument"


def test_connect_skips_what_it_is_told_to(gateway: Gateway, bare: Machine) -> None:
    done = bare("sandbox", "connect", "--skill-only", "--agent", "claude")
    assert done.code == 0 and not (bare.data / "config.json").exists()
    assert (Path(bare.env["HOME"]) / ".claude/skills/k8e-sandbox/SKILL.md").exists()
    done = bare("sandbox", "connect", "--skip-verify", *QUIET, "--endpoint", "gateway.example:50051")
    assert done.code == 0, done
    assert json.loads((bare.data / "config.json").read_text())["endpoint"] == "gateway.example:50051"
    both = bare("sandbox", "connect", "--skill-only", "--skip-skill")
    assert both.code == 1 and both.json["error"] == "invalid_argument"


def test_login_gives_a_certificate_for_a_key(gateway: Gateway, key: str, bare: Machine) -> None:
    env = {"K8E_SANDBOX_CERT": gateway.ca, "K8E_SANDBOX_ENDPOINT": gateway.endpoint}
    assert bare("sandbox", "login", env=env).json["error"] == "invalid_argument"
    assert bare("sandbox", "login", "--apikey", "0" * 64, env=env).json["error"] == "unauthenticated"
    assert bare("sandbox", "login", "--apikey", key, env={}).json["ok"] is False
    done = bare("sandbox", "login", "--apikey", key, "--device-name", "laptop", env=env)
    assert done.code == 0 and b"valid for" in done.stderr, done
    assert sorted(p.name for p in bare.data.iterdir() if p.is_file()) == [
        "ca.crt", "client.crt", "client.key", "config.json", "endpoint",
    ]  # fmt: skip
    assert (bare.data / "endpoint").read_text().strip() == gateway.endpoint
    assert bare.ok("sandbox", "status")["available"] is True


def test_k8e_D35_reset_certs_always_works(gateway: Gateway, key: str, bare: Machine) -> None:
    reset = ("sandbox", "connect", "--reset-certs")
    assert bare(*reset).code == 0  # nothing is there
    connected(bare, gateway, key, *QUIET)
    assert bare(*reset).code == 0
    left = {p.name for p in bare.data.iterdir()}
    assert left.isdisjoint({"ca.crt", "client.crt", "client.key", "endpoint"}) and "profiles.yaml" in left
    for name in ("ca.crt", "client.crt", "endpoint"):  # rubbish, and a gateway that is not there
        (bare.data / name).write_bytes(b"\0rubbish")
    (bare.data / "client.key").mkdir()
    (bare.data / "profiles.yaml").write_text("][")
    (bare.data / "config.json").write_text("rubbish")
    assert bare(*reset).code == 0
    assert {p.name for p in bare.data.iterdir()} & {"ca.crt", "client.crt", "client.key", "endpoint"} == set()
    (bare.data / "profiles.yaml").unlink()
    (bare.data / "config.json").unlink()
    connected(bare, gateway, key, *QUIET)
    again = bare(*reset, *QUIET, "--endpoint", gateway.endpoint, env={"K8E_SANDBOX_APIKEY": key})
    assert again.code == 0 and (bare.data / "client.crt").exists(), again  # in one go: the old CA still vouches
    assert bare.ok("sandbox", "status")["available"] is True


def test_k8e_D35_doctor_reports_repairs_that_fail(gateway: Gateway, key: str, bare: Machine) -> None:
    connected(bare, gateway, key, "--skip-path", "--agent", "claude")
    well = bare.ok("sandbox", "doctor")
    assert well["ok"] is True and well["problems"] == 0 and well["fixed"] == 0
    assert {"program", "profile", "certificates", "gateway", "skill files"} <= {one["name"] for one in well["checks"]}
    skill = Path(bare.env["HOME"]) / ".claude/skills/k8e-sandbox/SKILL.md"
    skill.unlink()
    broken = bare("sandbox", "doctor", "--json")
    found = next(one for one in broken.json["checks"] if one["name"] == "skill files")
    assert broken.code == 1 and broken.json["problems"] == 1 and found["ok"] is False and "--fix" in found["fix"]
    assert set(found) <= {"name", "ok", "detail", "fix", "optional"}
    fixed = bare.ok("sandbox", "doctor", "--fix")
    assert fixed["fixed"] == 1 and fixed["ok"] is True and skill.exists()
    skill.unlink()
    skill.parent.rmdir()
    skill.parent.write_text("in the way")
    failed = bare("sandbox", "doctor", "--fix")
    found = next(one for one in failed.json["checks"] if one["name"] == "skill files")
    assert failed.code == 1 and failed.json["ok"] is False and failed.json["fixed"] == 0
    assert found["ok"] is False and "repair failed" in found["detail"]


def test_doctor_finds_what_is_wrong_with_the_connection(gateway: Gateway, key: str, bare: Machine) -> None:
    connected(bare, gateway, key, *QUIET)
    (bare.data / "client.key").chmod(0o644)
    told = bare("sandbox", "doctor")
    assert told.code == 1 and any(one["name"] == "certificates" and not one["ok"] for one in told.json["checks"])
    (bare.data / "profiles.yaml").write_text("profiles: [")
    told = bare("sandbox", "doctor")
    assert told.code == 1 and any(one["name"] == "profile" and not one["ok"] for one in told.json["checks"])


def test_profiles_choose_the_gateway(gateway: Gateway, key: str, bare: Machine) -> None:
    connected(bare, gateway, key, *QUIET)
    path = bare.root / "mine.yaml"
    entry = {"endpoint": gateway.endpoint, "cert_dir": str(bare.data)}
    profiles = {"good": entry, "bad": {"endpoint": "127.0.0.1:1"}}
    path.write_text(yaml.safe_dump({"version": 1, "current_profile": "good", "profiles": profiles}))
    path.chmod(0o600)
    env = {"K8E_SANDBOX_CONFIG": str(path)}
    assert bare.ok("sandbox", "status", env=env)["available"] is True
    assert bare("sandbox", "sessions", "--context", "bad", env=env).code == 2
    assert bare("sandbox", "sessions", env={**env, "K8E_SANDBOX_PROFILE": "bad"}).code == 2
    assert bare.ok("sandbox", "sessions", "--context", "good", env={**env, "K8E_SANDBOX_PROFILE": "bad"})
    for name in ("k8e", "k8e-sandbox"):
        assert bare("sandbox", "--profile", "bad", "sessions", name=name, env=env).code == 2
        assert bare("sandbox", "--profile", "good", "sessions", name=name, env=env).code == 0
    unknown = bare("sandbox", "sessions", "--context", "none-such", env=env)
    assert unknown.code == 1 and unknown.json["error"] == "invalid_argument" and "good" in unknown.json["detail"]
    path.chmod(0o666)
    refused = bare("sandbox", "sessions", env=env)
    assert refused.code == 1 and refused.json["error"] == "permission_denied"
    assert bare("sandbox", "sessions", env={"K8E_SANDBOX_CONFIG": str(bare.root / "absent")}).code == 1


@pytest.mark.parametrize(
    "text", ["[]", "version: 2", "profiles: 3", "profiles: {a: 3}", "profiles: {a: {endpoint: 3}}", "profiles: {a: {x: y}}",
             "!!python/object/apply:os.system [touch /tmp/no]", "a: [", "\0"],
)  # fmt: skip
def test_a_bad_profiles_file_is_an_error(text: str, bare: Machine) -> None:
    bare.data.mkdir(parents=True)
    (bare.data / "profiles.yaml").write_text(text)
    done = bare("sandbox", "sessions")
    assert done.code == 1 and done.json["ok"] is False and "profiles" in done.json["detail"], done


def test_the_standalone_program_takes_verbs_without_the_word_sandbox(remote: Machine) -> None:
    made = remote.ok("run", "print(6*7)", "--lang", "python", name="k8e-sandbox-cli")
    assert made["stdout"] == "42\n"
    assert remote.ok("sandbox", "destroy", made["session_id"], name="k8e-sandbox-cli") == {"ok": True}
    assert not (Path(remote.env["HOME"]) / ".k8e").exists(), "ATOLL_HOME moves all state"
    entry = remote.data / "default"
    assert entry.is_dir() and os.listdir(entry)


def test_daemon_verbs_stay_local(remote: Machine) -> None:
    assert b"not running" in remote("daemon", "status").stdout
    assert remote("daemon", "stop", "--endpoint", "10.0.0.1:50051").code != 0
