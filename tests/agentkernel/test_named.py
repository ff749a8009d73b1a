"""Named sandboxes: their life, what they keep, and names that are refused."""

import json
import tarfile
import threading
from pathlib import Path

import pytest

from atoll.client._sync.driver import Link
from atoll.client.calls import get

from .conftest import Cli, until


def test_ak_P7_K8_life_cycle_keeps_the_files(cli: Cli, name: str) -> None:
    made = cli.ok("create", name)
    assert "Image:" in made.text and "vCPUs:" in made.text and "Memory:" in made.text and "sandbox start" in made.text
    found = cli.ok("list", "--json").json["sandboxes"]
    assert [row["state"] for row in found if row.get("name") == name] == ["stopped"]
    assert cli("exec", name, "true").code == 125
    cli.ok("sandbox", "start", name)
    assert (
        cli.ok("exec", name, "sh", "-c", "echo kept > /workspace/f; echo root > /root/f; hostname").text == f"{name}\n"
    )
    cli.ok("sandbox", "stop", name)
    cli.ok("sandbox", "stop", name)  # again is no error
    cli.ok("start", name)
    assert cli.ok("exec", name, "cat", "/workspace/f", "/root/f").stdout == b"kept\nroot\n"
    cli.ok("sandbox", "remove", name)
    again = cli.ok("sandbox", "remove", name, "--force")
    assert again.json["removed"] is False
    assert b"does not exist" in cli.ok("remove", name, "--force").stdout
    assert cli("start", name).code == 125 and cli("stop", name).code == 125


def test_an_existing_name_is_an_error_but_for_branch(cli: Cli, name: str) -> None:
    cli.ok("create", name)
    taken = cli("create", name)
    assert taken.code == 125 and name.encode() in taken.stderr
    assert cli("sandbox", "create", name).json["error"] == "already_exists"
    assert cli.ok("sandbox", "create", name, "--branch").json["name"] == name


def test_ak_K7_limits_profile_and_mounts_survive_create_and_start(cli: Cli, project: Path, name: str) -> None:
    (project / "agentkernel.toml").write_text(
        '[sandbox]\nname = "x"\n[agent]\ncompatibility_mode = "codex"\n[resources]\nvcpus = 2\nmemory_mb = 300\n'
    )
    (project / "f").write_text("here\n")
    cli.ok("create", name)
    cli.ok("start", name)
    info = cli.ok("sandbox", "info", name).json
    assert info["limits"]["memory_mb"] == {"value": 300, "enforced": True}
    assert info["limits"]["cpus"]["value"] == 2
    isolation = info["policy"]["isolation"]
    assert (isolation["mode"], isolation["read_only_root"]) == ("codex", True)
    done = cli("exec", name, "sh", "-c", "cat f; touch /x")
    assert done.stdout == b"here\n" and b"Read-only" in done.stderr
    text = cli.called("agentkernel").ok("sandbox", "info", name).text
    assert "Mode:     codex" in text and "Memory:   300 MB" in text


def test_ak_K6_dir_is_mounted(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f").write_text("d\n")
    cli.ok("create", name, "--dir", str(tmp_path / "data"))
    cli.ok("start", name)
    assert cli.ok("exec", name, "sh", "-c", "cat f; echo w > g").stdout == b"d\n"
    assert (tmp_path / "data" / "g").read_text() == "w\n"
    assert cli("create", name + "x", "--dir", str(tmp_path / "none")).code == 125


@pytest.mark.parametrize("bad", ["../x", "a/b", "-a", "a-", "_a", "a--b", "a_-b", "a.b", "a" * 64, "é", "a b", ""])
def test_ak_K14_bad_names_are_refused(cli: Cli, bad: str) -> None:
    done = cli("create", "--", bad)
    assert done.code == 2, done
    assert not done.stdout


def test_ak_K17_similar_names_are_not_confused(cli: Cli, name: str) -> None:
    cli.ok("create", name + "b")
    try:
        assert cli("start", name).code == 125
        cli.ok("create", name)
        cli.ok("remove", name)
        assert name + "b" in cli.names()
    finally:
        cli("remove", name + "b")


def test_ak_K18_concurrent_creates_and_removes(cli: Cli, name: str) -> None:
    codes: dict[int, int] = {}
    others: list[int] = []

    def same(number: int) -> None:
        codes[number] = cli("create", name).code

    def own(number: int) -> None:
        others.append(cli("create", f"{name}n{number}").code)
        others.append(cli("remove", f"{name}n{number}").code)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4) for work in (same, own)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes.values()) == [0, 125, 125, 125] and set(others) == {0}
    listed = cli.names()
    assert listed == sorted(listed) and listed.count(name) == 1


def test_detached_commands(cli: Cli, name: str) -> None:
    cli.ok("create", name)
    cli.ok("start", name)
    command = cli.ok("exec", "-d", name, "sh", "-c", "echo out; echo err >&2; sleep 600").text.strip()
    until(lambda: cli("sandbox", "exec-logs", name, command).stdout == b"out\n")
    assert cli("sandbox", "exec-logs", name, command).stderr == b"err\n"
    (row,) = cli.ok("sandbox", "exec-list", name).json["commands"]
    assert row["command_id"] == command and row["status"] == "running"
    cli.ok("sandbox", "exec-kill", name, command)
    assert cli.ok("sandbox", "exec-list", name).json["commands"][0]["status"] != "running"


def test_pause_and_resume(cli: Cli, name: str) -> None:
    cli.ok("create", name)
    cli.ok("start", name)
    assert cli.ok("sandbox", "pause", name).json["status"] == "paused"
    assert cli("exec", name, "true").code == 125
    cli.ok("resume", name)
    cli.ok("exec", name, "true")


def test_copy_export_extend_and_housekeeping(cli: Cli, project: Path, name: str) -> None:
    cli.ok("sandbox", "create", name, "--ttl", "1h")
    cli.ok("start", name)
    (project / "f").write_bytes(b"\x00\x01")
    cli.ok("sandbox", "cp", "f", f"{name}:/workspace/g")
    cli.ok("cp", f"{name}:/workspace/g", "back")
    assert (project / "back").read_bytes() == b"\x00\x01"
    cli.ok("sandbox", "export", name, "-o", "out.tar", "--path", "/workspace")
    with tarfile.open(project / "out.tar") as archive:
        assert any(member.name.rstrip("/").endswith("g") for member in archive)
    before = cli.ok("sandbox", "info", name).json["expires_at"]
    assert cli.ok("sandbox", "extend-ttl", name, "--by", "3d").json["expires_at"] > before
    assert name not in cli.ok("sandbox", "gc").json["removed"]
    text = cli.ok("sandbox", "export-config", name).text
    (project / "made.toml").write_text(text)
    other = name + "i"
    try:
        assert cli.ok("sandbox", "import-config", "made.toml", "--as", other).json["name"] == other
        cli.ok("sandbox", "stop", name)
        removed = cli.ok("sandbox", "clean").json["removed"]
        assert name in removed and other in removed
    finally:
        cli("remove", other)


def test_text_under_the_name_agentkernel(cli: Cli, name: str) -> None:
    kernel = cli.called("agentkernel")
    assert f"Sandbox '{name}' created" in kernel.ok("sandbox", "create", name).text
    assert f"Sandbox '{name}' started" in kernel.ok("sb", "start", name).text
    head, *rows = kernel.ok("sandbox", "list").text.splitlines()
    assert head.split() == ["NAME", "STATUS", "BACKEND"] and any(row.split()[:2] == [name, "running"] for row in rows)
    assert json.loads(kernel.ok("list", "--json").text)
    bad = kernel("sandbox", "start", "nosuch")
    assert bad.code == 125 and bad.stderr.startswith(b"Error: ")


def test_ak_P13_the_strongest_runtime_that_works_is_used(cli: Cli, name: str) -> None:
    """Nothing is said about it: what `doctor` found to work decides, in the order of strength, and the answer names it."""
    cli.env.pop("ATOLL_RUNTIME")
    works = {one["name"] for one in Link(cli.home).call(get("/v1/runtimes"))["runtimes"] if one["works"]}
    strongest = next(one for one in ("gvisor", "container") if one in works)
    cli.ok("create", name)
    assert cli.ok("sandbox", "info", name, "--json").json["runtime"] == strongest
    for word in ("container", "docker", "podman"):
        cli.ok("remove", name)
        cli.ok("create", name, "--backend", word)
        assert cli.ok("sandbox", "info", name, "--json").json["runtime"] == "container"
