"""The class Filesystem of the stock Python SDK, and signed URLs."""

import io
import urllib.error
import urllib.request
from typing import Any

import pytest
from e2b import FileType, InvalidArgumentException, SandboxException
from e2b.exceptions import AuthenticationException, FileNotFoundException, NotFoundException
from lab.waiting import PATIENCE, until


def test_write_and_read_in_every_form(box: Any) -> None:
    data = bytes(range(256)) * 500
    assert box.files.write("a/b/text", "grüße").path == "/home/user/a/b/text"
    assert box.files.read("a/b/text") == "grüße" and box.files.read("~/a/b/text") == "grüße"
    box.files.write("/tmp/bytes", data)
    assert box.files.read("/tmp/bytes", format="bytes") == data
    assert b"".join(box.files.read("/tmp/bytes", format="stream")) == data
    box.files.write("streamed", io.BytesIO(data))
    box.files.write("squeezed", data, gzip=True)
    assert box.files.read("squeezed", format="bytes") == box.files.read("streamed", format="bytes") == data
    names = ['q"uote', "back\\slash", "sp ace", "per%22cent", "ü"]
    made = box.files.write_files([{"path": f"many/{name}", "data": name} for name in names[:3] + names[4:]])
    assert [one.name for one in made] == names[:3] + names[4:]
    assert box.files.read('many/q"uote') == 'q"uote' and box.files.read("many/sp ace") == "sp ace"
    box.files.write("a/b/text", "shorter")
    assert box.files.read("a/b/text") == "shorter"
    assert box.files.read("/proc/version").startswith("Linux")
    assert box.files.write("empty", "").name == "empty" and box.files.read("empty") == ""


def test_owners_and_users(box: Any) -> None:
    box.files.write("mine/deep/file", "x")
    for path in ("mine", "mine/deep", "mine/deep/file"):
        info = box.files.get_info(path)
        assert (info.owner, info.group) == ("user", "user"), path
    assert box.files.get_info("mine/deep/file").permissions == "-rw-r--r--"
    box.files.write("theirs", "x", user="root")
    info = box.files.get_info("/root/theirs", user="root")
    assert info.owner == "root" and info.size == 1 and info.mode == 0o644
    with pytest.raises(AuthenticationException):
        box.files.read("x", user="nobody-here")


def test_what_is_wrong_is_told(box: Any) -> None:
    with pytest.raises(FileNotFoundException):
        box.files.read("no-such-file")
    with pytest.raises(FileNotFoundException):
        box.files.get_info("no-such-file")
    with pytest.raises(FileNotFoundException):
        box.files.list("no-such-directory")
    with pytest.raises(InvalidArgumentException):
        box.files.read("/home/user")
    with pytest.raises(InvalidArgumentException):
        box.files.write("/home/user", "x")
    box.files.write("a-file", "x")
    with pytest.raises(InvalidArgumentException):
        box.files.list("a-file")
    with pytest.raises(InvalidArgumentException):
        box.files.make_dir("a-file")
    with pytest.raises(FileNotFoundException):
        box.files.rename("no-such-file", "x")
    with pytest.raises(InvalidArgumentException):
        box.files.list("~other/x")
    with pytest.raises(InvalidArgumentException):
        box.files.write("tagged", "x", metadata={"key": "value"})


def test_directories(box: Any) -> None:
    assert box.files.make_dir("tree/one/two") is True and box.files.make_dir("tree/one/two") is False
    box.files.write("tree/z", "zz")
    box.files.write("tree/one/y", "y")
    box.commands.run("ln -s z tree/link; ln -s nowhere tree/broken; ln -s one tree/dir; mkfifo tree/pipe")
    flat = {one.name: one for one in box.files.list("tree")}
    assert set(flat) - {"pipe"} == {"broken", "dir", "link", "one", "z"}
    assert flat["one"].type == FileType.DIR and flat["z"].type == FileType.FILE and flat["z"].size == 2
    assert flat["link"].symlink_target == "/home/user/tree/z"
    deep = [one.path for one in box.files.list("tree", depth=2) if one.name != "pipe"]
    home = "/home/user/tree/"
    assert deep == [home + name for name in ("broken", "dir", "link", "one", "one/two", "one/y", "z")]
    assert [one.path for one in box.files.list("tree/dir")] == [f"{home}dir/two", f"{home}dir/y"]
    moved = box.files.rename("tree/z", "elsewhere/new/z2")
    assert moved.path == "/home/user/elsewhere/new/z2" and not box.files.exists("tree/z")
    assert box.files.exists("elsewhere/new/z2") and box.files.read("elsewhere/new/z2") == "zz"
    box.files.remove("tree")
    box.files.remove("tree")
    assert not box.files.exists("tree/one")


def test_polled_watch(box: Any) -> None:
    box.files.make_dir("watched")
    watch = box.files.watch_dir("watched", recursive=True)
    box.files.write("watched/file", "x")
    found: list[tuple[str, str]] = []

    def seen(change: tuple[str, str]) -> bool:
        found.extend((event.name, event.type.value) for event in watch.get_new_events())
        return change in found

    until(lambda: seen(("file", "write")), "the file's changes were told")
    assert found == [("file", "create"), ("file", "chmod"), ("file", "write")]
    box.files.make_dir("watched/sub")
    until(lambda: seen(("sub", "create")), "the directory is watched too")
    box.files.rename("watched/file", "watched/sub/other")
    until(lambda: seen(("sub/other", "create")), "the file's new place was told")
    box.files.remove("watched/sub/other")
    until(lambda: seen(("sub/other", "remove")), "every change was told")
    assert ("file", "rename") in found
    watch.stop()
    with pytest.raises((NotFoundException, SandboxException)):
        watch.get_new_events()
    with pytest.raises(FileNotFoundException):
        box.files.watch_dir("no-such-directory")
    with pytest.raises(InvalidArgumentException):
        box.files.watch_dir("/etc/passwd")


def fetch(url: str, data: bytes | None = None, kind: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(url, data, {"Content-Type": kind} if kind else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


def test_signed_urls(door: Any, box: Any) -> None:
    box.files.write("signed file", "secret")
    url = box.download_url("signed file", use_signature_expiration=600)
    assert fetch(url) == (200, b"secret")
    assert fetch(url.replace("signed+file", "other").replace("signed%20file", "other"))[0] == 401
    assert fetch(url.replace("signature=v1_", "signature=v1_A"))[0] == 401
    upload = box.upload_url("sent", use_signature_expiration=600)
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\ncontent\r\n--b--\r\n'
    assert fetch(upload, form, "multipart/form-data; boundary=b")[0] == 200
    assert box.files.read("sent") == "content"
    assert fetch(url, form, "multipart/form-data; boundary=b")[0] == 401, "a signature to read does not write"
    late = box.download_url("signed file", use_signature_expiration=-5)
    status, told = fetch(late)
    assert status == 401 and b"signature is already expired" in told
    assert fetch(f"http://127.0.0.1:{door.port}/files?path=x&signature=v1_x")[0] == 401
