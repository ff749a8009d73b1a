"""Snapshots on real sandboxes: what is saved comes back, is stored once, and a crash leaves nothing half done."""

import hashlib
import io
import json
import tarfile
import threading
from pathlib import Path

import pytest
from lab.daemon import PATIENCE, Box, DaemonProcess, Failed, UnixConnection, until
from lab.terminal import Atoll

TREE = r"""
import os
os.chdir('/workspace')
os.makedirs('d/e/f'); os.chmod('d/e', 0o700)
open('d/blob', 'wb').write(os.urandom(9_000_001))
open('zeros', 'wb').write(bytes(5_000_000))
open('run.sh', 'w').write('#!/bin/sh\nexit 0\n'); os.chmod('run.sh', 0o755)
open('empty', 'w'); open(b'caf\xe9\xff', 'wb').write(b'\0\xff\n')
os.symlink('/etc/passwd', 'out'); os.symlink('nowhere', 'dangling'); os.link('run.sh', 'again')
os.mkfifo('pipe'); os.chown('empty', 1000, 1001); os.utime('run.sh', (1, 1234567890.25))
"""
LOOK = r"""
import os, hashlib
found = []
for top, dirs, files in os.walk(b'/workspace'):
    for name in sorted(dirs + files):
        path = os.path.join(top, name)
        st = os.lstat(path)
        body = os.readlink(path) if os.path.islink(path) else b'' if not os.path.isfile(path) else open(path, 'rb').read()
        found.append((path, oct(st.st_mode), st.st_uid, st.st_gid, round(st.st_mtime, 3), hashlib.sha256(body).hexdigest()))
for line in sorted(found):
    if not line[1].startswith('0o1'+'0') or line[1].startswith('0o100'): print(line)
"""


def save(box: Box, name: str, **fields: object) -> dict[str, object]:
    return dict(box.daemon.post(f"{box.path}/snapshots", {"name": name, **fields}))


def restore(daemon: DaemonProcess, name: str, **fields: object) -> Box:
    limits = {"memory_mb": 256, "pids": 128, "disk_mb": 128}
    return Box(daemon, daemon.post(f"/v1/snapshots/{name}/restore", {"sandbox": {"limits": limits, **fields}})["id"])


def content(box: Box) -> str:
    done = box.run(LOOK)
    assert done["exit_code"] == 0, done
    return str(done["stdout"])


def test_k8e_P16_the_new_sandbox_has_the_same_files(daemon: DaemonProcess, box: Box) -> None:
    assert box.run(TREE)["exit_code"] == 0
    made = save(box, "tree")
    assert made["file_count"] == 8 and made["skipped"] == ["pipe"]
    other = restore(daemon, "tree")
    assert content(other) == content(box)
    same = other.exec("stat -c %i run.sh again | uniq | wc -l")
    assert same["stdout"].strip() == "1", "hard links stay one file"
    other.destroy()
    daemon.delete("/v1/snapshots/tree")


def test_k8e_P16_the_verbs_of_the_command_line(atoll: Atoll, box: Box) -> None:
    box.exec("echo kept > /workspace/note")
    session = f"sess-{box.id}"
    saved = atoll.ok("sandbox", "snapshot", "save", session, "my-checkpoint")
    assert saved["ok"] and saved["name"] == "my-checkpoint" and saved["file_count"] == 1 and saved["size_bytes"] == 5
    (listed,) = atoll.ok("sandbox", "snapshot", "list")["snapshots"]
    assert {"name", "created_at", "size_bytes", "file_count"} <= set(listed)
    restored = atoll.ok("sandbox", "snapshot", "restore", "my-checkpoint", "--tenant", "t1", "--base")
    assert restored["restored_from"] == "my-checkpoint" and restored["tenant_id"] == "t1"
    assert atoll.ok("sandbox", "read", restored["session_id"], "/workspace/note")["content"] == "kept\n"
    atoll.ok("sandbox", "destroy", restored["session_id"])
    assert atoll.ok("sandbox", "snapshot", "inspect", "my-checkpoint")["files"][0]["path"] == "note"
    assert atoll.ok("sandbox", "snapshot", "delete", "my-checkpoint")["ok"]
    assert atoll.fails("sandbox", "snapshot", "restore", "my-checkpoint")["error"] == "not_found"


def test_k8e_D31_saving_twice_under_one_name_is_safe(daemon: DaemonProcess, box: Box) -> None:
    box.exec("echo one > /workspace/a")
    save(box, "twice")
    with pytest.raises(Failed) as caught:
        save(box, "twice")
    assert caught.value.code == "already_exists"
    box.exec("echo two > /workspace/a")
    save(box, "twice", force=True)
    other = restore(daemon, "twice")
    assert other.read("/workspace/a") == b"two\n"
    other.destroy()
    daemon.delete("/v1/snapshots/twice")


def test_an_unchanged_file_is_not_read_again_and_a_hidden_change_is_seen(daemon: DaemonProcess, box: Box) -> None:
    """Content is changed with size and mtime kept: only ctime tells."""
    box.run("import os\nopen('/workspace/big','wb').write(os.urandom(6_000_000))\nos.utime('/workspace/big', (1, 1))")
    until(lambda: box.exec("test $(( $(date +%s) - $(stat -c %Z big) )) -gt 1")["exit_code"] == 0, "a second passes")
    first = save(box, "first")
    assert int(str(first["stored_bytes"])) > 5_000_000
    assert save(box, "second")["stored_bytes"] == 0
    box.run(
        "import os\nf=open('/workspace/big','r+b'); f.write(b'changed!'); f.close()\nos.utime('/workspace/big', (1, 1))"
    )
    third = save(box, "third")
    assert int(str(third["stored_bytes"])) > 0
    other = restore(daemon, "third")
    assert other.read("/workspace/big", "&limit=8") == b"changed!"
    other.destroy()
    for name in ("first", "second", "third"):
        daemon.delete(f"/v1/snapshots/{name}")


def test_a_stopped_sandbox_can_be_saved_and_stays_stopped(daemon: DaemonProcess) -> None:
    box = daemon.create(persistent=True)
    box.exec("echo asleep > /workspace/a")
    daemon.post(f"{box.path}/stop")
    save(box, "asleep")
    assert box.info()["state"] == "stopped"
    daemon.post(f"{box.path}/start")
    assert box.read("/workspace/a") == b"asleep\n"
    box.destroy()
    other = restore(daemon, "asleep")
    assert other.read("/workspace/a") == b"asleep\n"
    other.destroy()
    daemon.delete("/v1/snapshots/asleep")


def test_a_paused_sandbox_is_refused(daemon: DaemonProcess, box: Box) -> None:
    daemon.post(f"{box.path}/pause")
    with pytest.raises(Failed) as caught:
        save(box, "frozen")
    assert caught.value.code == "failed_precondition"
    daemon.post(f"{box.path}/resume")


def test_k8e_D31_a_read_only_root_and_files_outside_the_workspace(daemon: DaemonProcess, box: Box) -> None:
    box.exec("echo mine > /etc/mine; mkdir /opt/tool; echo 1 > /opt/tool/bin; echo w > /workspace/w; echo t > /tmp/t")
    save(box, "full", full=True)
    other = restore(daemon, "full")
    seen = other.exec("cat /etc/mine /opt/tool/bin /workspace/w; ls /tmp")
    assert seen["stdout"] == "mine\n1\nw\n"
    other.destroy()
    strict = daemon.create(read_only_root=True)
    strict.exec("echo r > /workspace/r")
    save(strict, "strict")
    strict.destroy()
    again = restore(daemon, "strict", read_only_root=True)
    assert again.read("/workspace/r") == b"r\n"
    again.destroy()
    for name in ("full", "strict"):
        daemon.delete(f"/v1/snapshots/{name}")


def test_k8e_D31_what_was_deleted_of_the_image_stays_deleted(
    atoll: Atoll, daemon: DaemonProcess, box: Box, tmp_path: Path
) -> None:
    """A file, a directory, one replaced by a file and one emptied and filled again; also by way of an archive."""
    names = box.exec("ls -d /usr/share/*/ | head -3")["stdout"].split()
    assert len(names) == 3 and box.exec("ls /usr/bin/yes")["exit_code"] == 0
    gone, replaced, filled = (name.rstrip("/") for name in names)
    box.exec(
        f"rm /usr/bin/yes; rm -r {gone} {replaced} {filled}; echo now a file > {replaced}; mkdir {filled}; echo 1 > {filled}/new"
    )
    assert save(box, "pruned", full=True)["skipped"] == []
    told = {item["path"] for item in daemon.get("/v1/snapshots/pruned")["files"] if item["type"] == "deleted"}
    assert {"usr/bin/yes", gone[1:], replaced[1:]} <= told and not any(path.startswith("workspace") for path in told)
    atoll.ok("sandbox", "snapshot", "export", "pruned", str(tmp_path / "pruned.tar"))
    atoll.ok("sandbox", "snapshot", "import", str(tmp_path / "pruned.tar"), "carried")
    for name in ("pruned", "carried"):
        other = restore(daemon, name)
        check = f"ls -A {filled}; cat {replaced}; ls /usr/bin/yes {gone} 2>/dev/null; ls /usr/bin/tac"
        assert other.exec(check)["stdout"] == "new\nnow a file\n/usr/bin/tac\n"
        other.destroy()
        daemon.delete(f"/v1/snapshots/{name}")
    assert daemon.get("/v1/sandboxes")["sandboxes"][0]["id"] == box.id, "the one it was compared with is gone"


def test_an_archive_goes_out_and_comes_back(atoll: Atoll, box: Box, tmp_path: Path) -> None:
    box.run(TREE)
    save(box, "travel")
    path = str(tmp_path / "travel.tar")
    assert atoll.ok("sandbox", "snapshot", "export", "travel", path)["ok"]
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["travel/metadata.json", "travel/workspace.tar.gz"]
        described = json.load(archive.extractfile("travel/metadata.json"))  # type: ignore[arg-type]
        inner = archive.extractfile("travel/workspace.tar.gz").read()  # type: ignore[union-attr]
    assert described["session_id"] == box.id and described["workspace_sha256"] == hashlib.sha256(inner).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(inner)) as tree:
        assert tree.getmember("run.sh").mode == 0o755
    atoll.ok("sandbox", "snapshot", "import", path, "arrived")
    other = restore(box.daemon, "arrived")
    assert content(other) == content(box)
    other.destroy()
    for name in ("travel", "arrived"):
        box.daemon.delete(f"/v1/snapshots/{name}")


def test_a_daemon_killed_in_the_middle_of_a_save_leaves_no_snapshot(own_daemon: DaemonProcess) -> None:
    box = own_daemon.create(limits={"memory_mb": 256, "disk_mb": 512})
    box.run("import os\nfor i in range(60): open(f'/workspace/{i}','wb').write(os.urandom(4<<20))", timeout_ms=120_000)

    def ask() -> None:
        connection = UnixConnection(own_daemon.home / "daemon.sock")
        connection.timeout = PATIENCE
        try:
            connection.request("POST", f"{box.path}/snapshots", json.dumps({"name": "half"}))
            connection.getresponse().read()
        except OSError:
            pass
        finally:
            connection.close()

    asking = threading.Thread(target=ask)
    asking.start()
    store = own_daemon.home / "snapshots" / "staging"
    until(lambda: store.is_dir() and any(store.iterdir()), "content is being stored")
    own_daemon.kill()
    asking.join(PATIENCE)
    own_daemon.start()
    left = own_daemon.get("/v1/snapshots")["snapshots"]
    assert left == [] or left[0]["file_count"] == 60, "a snapshot is there whole or not at all"
    save(box, "half", force=True)
    own_daemon.delete("/v1/snapshots/half")
    left = [path for path in store.parent.rglob("*") if path.is_file() and path.name != "snapshot.key"]
    assert not left, "what a crash left is collected too"
