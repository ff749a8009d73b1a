"""`sandbox create` has two grammars in one: no flag of either is ignored, and a bad value is told by its flag."""

import secrets
from pathlib import Path

import pytest

from .conftest import Gateway


def test_k8e_D36_a_directory_for_a_sandbox_that_starts_at_once(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("from outside")
    name = f"d-{secrets.token_hex(4)}"
    made = gateway.ok("sandbox", "create", "--name", name, "--dir", str(tmp_path), "--ttl", "1h", "--memory", "128")
    try:
        assert gateway.ok("sandbox", "read", made["session_id"], "/workspace/f")["content"] == "from outside"
        assert gateway.ok("sandbox", "get", made["session_id"])["expires_at"] > 0
    finally:
        gateway.ok("sandbox", "destroy", made["session_id"])
    missing = gateway("sandbox", "create", "--dir", str(tmp_path / "none"))
    assert missing.code == 1 and "is not a directory" in missing.json["detail"]


def test_k8e_D36_a_named_sandbox_takes_the_other_flags_too(gateway: Gateway) -> None:
    name = f"n-{secrets.token_hex(4)}"
    flags = ("--pids", "99", "--disk", "300", "--idle-timeout", "77", "--label", "a=b", "--tenant", "team")
    gateway.ok("sandbox", "create", name, "--image", "host", *flags)
    try:
        found = gateway.ok("sandbox", "info", name)
        assert (found["limits"]["pids"]["value"], found["limits"]["disk_mb"]["value"]) == (99, 300)
        assert found["idle_timeout_s"] == 77
        assert found["labels"]["a"] == "b" and found["labels"]["k8e.tenant"] == "team"
    finally:
        gateway.ok("sandbox", "remove", name)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--template", "python"), "--template"),
        (("--branch",), "--branch"),
        (("later", "--manifest", "x.yaml"), "--manifest"),
        (("later", "--git-repo", "https://example.com/x"), "--git-repo"),
        (("later", "--name", "other"), "--name"),
    ],
)
def test_k8e_D36_a_flag_that_means_nothing_there_is_refused(
    gateway: Gateway, words: tuple[str, ...], flag: str
) -> None:
    done = gateway("sandbox", "create", *words)
    assert done.code == 1 and done.json["error"] == "invalid_argument"
    assert done.json["detail"].startswith(flag)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--memory", "banana"), ("--memory", "1"), ("--memory", "-5"), ("--memory", "99999999999"), ("--cpus", "0"), ("--cpus", "x"),
        ("--pids", "1"), ("--files", "2"), ("--disk", "1"), ("--lifetime", "-1"), ("--idle-timeout", "0"),
        ("--host-access", "99999"),
    ],
)  # fmt: skip
def test_a_bad_limit_is_told_by_its_flag_with_an_example(gateway: Gateway, flag: str, value: str) -> None:
    done = gateway("sandbox", "create", flag, value)
    assert done.code == 1 and done.json["error"] == "invalid_argument"
    detail = done.json["detail"]
    assert detail.startswith(f"{flag} ") and f"for example {flag} " in detail
    assert "$" not in detail and "Expected" not in detail
