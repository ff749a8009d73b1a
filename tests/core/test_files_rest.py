"""Files of a real sandbox through REST."""

import base64
import io
import json
import tarfile

import pytest
from lab.daemon import Box, DaemonProcess, Failed


def test_write_read_offset_append_and_mode(box: Box) -> None:
    blob = bytes(range(256)) * 5000
    assert box.write("/workspace/a/b/c.bin", blob, "&parents=1&mode=0640")["bytes"] == len(blob)
    assert box.read("/workspace/a/b/c.bin") == blob
    assert box.read("a/b/c.bin", "&offset=10&limit=20") == blob[10:30]
    box.write("a/b/c.bin", b"tail", "&append=1")
    assert box.files("stat", path="a/b/c.bin")["stat"]["size"] == len(blob) + 4
    assert box.files("stat", path="a/b/c.bin")["stat"]["mode"] & 0o777 == 0o640
    with pytest.raises(Failed) as caught:
        box.write("a/b/c.bin", b"x", "&create=new")
    assert caught.value.code == "file_exists" and caught.value.status == 409


def test_the_tree_operations(box: Box) -> None:
    box.files("mkdir", path="/workspace/t/u", parents=True)
    box.write("/workspace/t/one.txt", b"alpha\nbeta\n")
    box.files("copy", src="t/one.txt", dst="t/two.txt")
    box.files("move", src="t/two.txt", dst="t/u/three.txt")
    box.files("symlink", path="t/link", target="one.txt")
    box.files("chmod", path="t/one.txt", mode=0o600)
    entries = {e["path"]: e for e in box.files("list", path="/workspace/t", recursive=True)["entries"]}
    assert {p.removeprefix("/workspace/t/") for p in entries} == {"one.txt", "link", "u", "u/three.txt"}
    matches = box.files("grep", path="t", pattern="b.ta", recursive=True)["matches"]
    assert sorted(m["line"] for m in matches) == [2, 2]
    assert box.files("sed", files=["/workspace/t/one.txt"], pattern="alpha", replacement="omega")["total"] == 1
    assert box.read("t/one.txt") == b"omega\nbeta\n"
    assert box.files("du", path="t")["inodes"] >= 4
    with pytest.raises(Failed) as caught:
        box.files("remove", path="t")
    assert caught.value.code == "not_empty"
    box.files("remove", path="t", recursive=True)
    with pytest.raises(Failed) as caught:
        box.files("stat", path="t")
    assert caught.value.code == "file_not_found" and caught.value.status == 404


def test_names_of_any_bytes(box: Box) -> None:
    box.write("/workspace/odd/n%FFm", b"odd", "&parents=1")
    (entry,) = box.files("list", path="/workspace/odd")["entries"]
    assert base64.b64decode(entry["path_b64"]) == b"/workspace/odd/n\xffm" and "�" in entry["path"]
    assert box.files("stat", path_b64=entry["path_b64"])["stat"]["size"] == 3
    assert box.read("/workspace/odd/n%FFm") == b"odd"
    box.files("remove", path="/workspace/odd", recursive=True)


def test_tar_both_ways(box: Box, daemon: DaemonProcess) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo("dir/file")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"hello"))
    box.files("mkdir", path="/workspace/tar")
    assert daemon.ask("PUT", f"{box.path}/tar?path=/workspace/tar", made.getvalue())["files"] >= 1
    _, data = daemon.raw("GET", f"{box.path}/tar?path=/workspace/tar")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = [m.name for m in tar.getmembers() if m.isfile()]
        assert [n for n in names if n.endswith("dir/file")]


def test_a_cut_upload_leaves_the_old_file(box: Box, daemon: DaemonProcess) -> None:
    box.write("/workspace/kept", b"old")
    import socket

    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.home / "daemon.sock"))
        sock.sendall(f"PUT {box.path}/files?path=/workspace/kept HTTP/1.1\r\nHost: x\r\n".encode())
        sock.sendall(b"Content-Length: 1000000\r\n\r\n" + b"x" * 500_000)
    assert box.read("/workspace/kept") == b"old"
    from lab.daemon import until

    until(lambda: set(box.exec("ls -A /workspace")["stdout"].split()) >= {"kept"}
          and not [n for n in box.exec("ls -A /workspace")["stdout"].split() if "kept" in n and n != "kept"],
          "no temporary is left")  # fmt: skip


def test_a_full_disk_is_disk_full_and_the_sandbox_goes_on(daemon: DaemonProcess) -> None:
    box = daemon.create(limits={"disk_mb": 32, "memory_mb": 256})
    with pytest.raises(Failed) as caught:
        box.write("/workspace/big", bytes(80 << 20))
    assert caught.value.code == "disk_full" and caught.value.status == 507
    box.write("/workspace/small", b"fits")
    assert box.exec(["cat", "/workspace/small"])["stdout"] == "fits"
    box.destroy()


def test_watch_tells_changes(box: Box, daemon: DaemonProcess) -> None:
    box.files("mkdir", path="/workspace/watched")
    frames = daemon.stream(f"{box.path}/watch?path=/workspace/watched&recursive=1")
    assert json.loads(next(frames)[1]) == {"watching": True}
    seen: set[str] = set()
    from lab.daemon import until

    def touched() -> bool:
        box.write("/workspace/watched/new", b"x")
        kind, payload = next(frames)
        assert kind == 3
        seen.update(change["path"] for change in json.loads(payload).get("changes", []))
        return any(path.endswith("/new") for path in seen)

    until(touched, "the change is told")
    frames.close()  # type: ignore[attr-defined]
