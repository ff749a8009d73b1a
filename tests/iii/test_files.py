"""The file functions on a real sandbox: answers, errors, fixes that work, links and other traps."""

import base64
from typing import Any

import pytest
from lab.functions import Envelope, FunctionLab, until
from lab.sandboxes import descriptors

FS = "sandbox::fs::"


def retry_with_fix(fn: FunctionLab, name: str, **fields: Any) -> Any:
    """What a client does with an error: merge the fix and send again."""
    try:
        return fn(name, **fields)
    except Envelope as refused:
        assert refused.fix is not None, refused.all
        return fn(name, **{**fields, **refused.fix})


def test_iii_Q18_write_takes_one_body(fn: FunctionLab, box: str) -> None:
    """Write text or bytes; none or two bodies, or a channel where there is no bus, is S001."""
    written = fn(FS + "write", sandbox_id=box, path="/tmp/w", content="héllo")
    assert written == {"bytes_written": 6, "path": "/tmp/w"}
    raw = b"\x00\xff\n"
    fn(FS + "write", sandbox_id=box, path="tmp/raw", content_b64=base64.b64encode(raw).decode(), mode="600")
    read = fn(FS + "read", sandbox_id=box, path="/tmp/raw")
    assert base64.b64decode(read["content_b64"]) == raw and "body" not in read and read["mode"] == "0600"
    assert fn.refused(FS + "write", sandbox_id=box, path="/tmp/w").code == "S001"
    assert fn.refused(FS + "write", sandbox_id=box, path="/tmp/w", content="a", content_b64="YQ==").code == "S001"
    assert fn.refused(FS + "write", sandbox_id=box, path="/tmp/w", content_b64="*").code == "S001"
    ref = {"channel_id": "c", "access_key": "k", "direction": "read"}
    assert fn.refused(FS + "write", sandbox_id=box, path="/tmp/w", content=ref).code == "S001"
    assert fn.refused(FS + "write", sandbox_id=box, path="", content="x").code == "S001"
    assert fn.refused(FS + "write", sandbox_id=box, path="/tmp/\0", content="x").code == "S001"
    assert fn.get(box, "/tmp/w") == "héllo"


def test_iii_Q21_fixes_are_real(fn: FunctionLab, box: str) -> None:
    """Succeed after merging a fix; never offer one that destroys something."""
    assert retry_with_fix(fn, FS + "write", sandbox_id=box, path="/new/a/b", content="x")["bytes_written"] == 1
    assert retry_with_fix(fn, FS + "mkdir", sandbox_id=box, path="/new/c/d") == {"created": True}
    assert retry_with_fix(fn, FS + "mkdir", sandbox_id=box, path="/new/c/d") == {"created": False}
    found = retry_with_fix(fn, FS + "grep", sandbox_id=box, path="/new", pattern="x", recursive=False)
    assert found["matches"][0]["path"] == "/new/a/b"
    for refused, code, word in (
        (fn.refused(FS + "rm", sandbox_id=box, path="/new"), "S214", "recursive"),
        (fn.refused(FS + "mv", sandbox_id=box, src="/new/a", dst="/tmp"), "S213", "overwrite"),
    ):
        assert (refused.code, refused.fix) == (code, None) and word in refused.all["fix_note"]


def test_iii_write_replaces_links_and_sets_modes(fn: FunctionLab, box: str) -> None:
    """Replace a symlink instead of writing through it; apply the mode exactly."""
    fn.sh(box, "mkdir -p /l; echo old > /l/target; ln -s target /l/link; umask 077")
    fn(FS + "write", sandbox_id=box, path="/l/link", content="new", mode="4755")
    assert fn.get(box, "/l/target") == "old\n"
    stat = fn(FS + "stat", sandbox_id=box, path="/l/link")
    assert stat["is_symlink"] is False and stat["mode"] == "4755" and stat["size"] == 3
    assert fn.sh(box, "ls -A /l")["stdout"] == "link\ntarget\n"
    assert fn.refused(FS + "write", sandbox_id=box, path="/l/x", content="", mode="8").code == "S210"


def test_iii_read(fn: FunctionLab, box: str) -> None:
    """Read text as body; say that a directory, a missing file or a pipe is none."""
    fn.sh(
        box,
        "mkfifo /tmp/fifo; ln -sf /tmp/through /tmp/to; echo x > /tmp/through; head -c 1048576 /dev/zero > /tmp/mib",
    )
    read = fn(FS + "read", sandbox_id=box, path="/tmp/to")
    assert read["body"] == "x\n" and read["size"] == 2 and read["mode"] == "0644" and read["mtime"] > 0
    assert "body" not in fn(FS + "read", sandbox_id=box, path="/tmp/mib")
    assert fn.refused(FS + "read", sandbox_id=box, path="/tmp").code == "S212"
    assert fn.refused(FS + "read", sandbox_id=box, path="/none").code == "S211"
    assert fn.refused(FS + "read", sandbox_id=box, path="/tmp/fifo").code == "S216"


def test_iii_large_files_have_a_place_to_be_had(fn: FunctionLab, box: str) -> None:
    """Name where a large file's bytes are instead of putting them into the answer; a stream goes in whole."""
    data = bytes(range(256)) * 40_000
    status, answer = fn.ask("PUT", f"/functions/{FS}write?sandbox_id={box}&path=/tmp/big&mode=0640", data)
    assert status == 200 and answer["bytes_written"] == len(data), answer
    read = fn(FS + "read", sandbox_id=box, path="/tmp/big")
    assert read["size"] == len(data) and "body" not in read and "content_b64" not in read
    status, raw = fn.ask("GET", f"{read['content_url']}?sandbox_id={box}&path=/tmp/big")
    assert status == 200 and raw == data
    status, answer = fn.ask("GET", f"{read['content_url']}?sandbox_id={box}&path=/none")
    assert "S211" in answer["error"]["message"]


def test_iii_ls_and_stat(fn: FunctionLab, box: str) -> None:
    """List one level sorted, hidden files too, links as links; a link to a directory is not listed through."""
    fn.sh(box, "mkdir -p /ls/sub; cd /ls; touch b .a; chmod 1755 sub; ln -s sub to; ln -s none dangling")
    entries = fn(FS + "ls", sandbox_id=box, path="/ls")["entries"]
    assert [one["name"] for one in entries] == [".a", "b", "dangling", "sub", "to"]
    by = {one["name"]: one for one in entries}
    assert by["sub"]["is_dir"] and by["sub"]["mode"] == "1755" and by["to"]["is_symlink"] and not by["to"]["is_dir"]
    assert by["to"]["link_target"] == "sub" and by["b"]["uid"] == 0
    assert fn.refused(FS + "ls", sandbox_id=box, path="/ls/b").code == "S212"
    assert fn.refused(FS + "ls", sandbox_id=box, path="/ls/to").code == "S212"
    assert fn.refused(FS + "ls", sandbox_id=box, path="/none").code == "S211"
    assert fn(FS + "stat", sandbox_id=box, path="/")["name"] == "/"
    assert fn(FS + "stat", sandbox_id=box, path="/ls/dangling")["is_symlink"] is True
    assert fn.refused(FS + "stat", sandbox_id=box, path="/ls/none").code == "S211"


def test_iii_mkdir(fn: FunctionLab, box: str) -> None:
    """Make directories with their exact mode; what is in the way is told."""
    assert fn(FS + "mkdir", sandbox_id=box, path="/m", mode="2775") == {"created": True}
    assert fn(FS + "stat", sandbox_id=box, path="/m")["mode"] == "2775"
    assert fn.refused(FS + "mkdir", sandbox_id=box, path="/m").code == "S213"
    assert fn(FS + "mkdir", sandbox_id=box, path="/m", parents=True) == {"created": False}
    assert fn(FS + "mkdir", sandbox_id=box, path="/m/a/b", parents=True) == {"created": True}
    refused = fn.refused(FS + "mkdir", sandbox_id=box, path="/m/x/y")
    assert refused.code == "S211" and refused.fix == {"parents": True}
    fn.put(box, "/m/file", "")
    assert fn.refused(FS + "mkdir", sandbox_id=box, path="/m/file", parents=True).code == "S213"


def test_iii_rm(fn: FunctionLab, box: str) -> None:
    """Remove files, links and empty directories; more only with recursive, and never through a link."""
    fn.sh(box, "mkdir -p /r/full/x /r/empty /r/kept; touch /r/kept/f; ln -s /r/kept /r/link; ln -s /r/kept /r/full/l")
    for path in ("/r/empty", "/r/link"):
        assert fn(FS + "rm", sandbox_id=box, path=path) == {"removed": True}
    assert fn.refused(FS + "rm", sandbox_id=box, path="/r/full").code == "S214"
    assert fn(FS + "rm", sandbox_id=box, path="/r/full", recursive=True) == {"removed": True}
    assert fn(FS + "stat", sandbox_id=box, path="/r/kept/f")["size"] == 0
    assert fn.refused(FS + "rm", sandbox_id=box, path="/r/none").code == "S211"


def test_iii_Q19_D10_chmod_stays_in_its_tree(fn: FunctionLab, box: str) -> None:
    """Change modes and owners; links inside a tree lead nowhere."""
    fn.sh(
        box,
        "mkdir -p /c/t/d /c/out; touch /c/t/f /c/out/f; chmod 600 /c/out/f; ln -s /c/out /c/t/l; ln -s /c/t/f /c/one",
    )
    assert fn(FS + "chmod", sandbox_id=box, path="/c/t", mode="0777", recursive=True)["updated"] == 3
    assert fn.sh(box, "stat -c %a /c/out/f /c/t/f")["stdout"] == "600\n777\n"
    assert fn(FS + "chmod", sandbox_id=box, path="/c/one", mode="0640", uid=5, gid=6)["updated"] == 1
    assert fn.sh(box, "stat -c '%a %u %g' /c/t/f")["stdout"] == "640 5 6\n"
    fn.sh(box, "ln -s nowhere /c/dangling")
    assert fn.refused(FS + "chmod", sandbox_id=box, path="/c/dangling", mode="0600").code == "S211"
    assert fn.refused(FS + "chmod", sandbox_id=box, path="/c/one", mode="rw").code == "S210"
    assert fn.refused(FS + "chmod", sandbox_id=box, path="/c/one").code == "S001"


def test_iii_D10_mv_across_mounts(fn: FunctionLab, box: str) -> None:
    """Move trees to another mount, dangling links too; never into an existing directory."""
    fn.sh(box, "mkdir -p /v/tree/sub /dev/shm/there; echo x > /v/tree/sub/f; ln -s none /v/dang")
    assert fn(FS + "mv", sandbox_id=box, src="/v/tree", dst="/dev/shm/tree") == {"moved": True}
    assert fn.get(box, "/dev/shm/tree/sub/f") == "x\n"
    assert fn.refused(FS + "stat", sandbox_id=box, path="/v/tree").code == "S211"
    assert fn(FS + "mv", sandbox_id=box, src="/v/dang", dst="/v/dang2")["moved"]
    fn.sh(box, "echo 1 > /v/a; echo 2 > /v/b; mkdir /v/dir")
    assert fn.refused(FS + "mv", sandbox_id=box, src="/v/a", dst="/v/b").code == "S213"
    assert fn.refused(FS + "mv", sandbox_id=box, src="/v/a", dst="/v/dir").code == "S213"
    assert fn(FS + "mv", sandbox_id=box, src="/v/a", dst="/v/b", overwrite=True)["moved"]
    assert fn.get(box, "/v/b") == "1\n"
    assert fn.refused(FS + "mv", sandbox_id=box, src="/v/none", dst="/v/x").code == "S211"


def test_iii_D7_long_answers_are_cut_and_say_so(fn: FunctionLab, box: str) -> None:
    """Cut what does not fit into one message."""
    fn.sh(box, "mkdir /many; cd /many; yes \"$(printf 'x%.0s' $(seq 4000))\" | head -4000 > f", timeout_ms=120000)
    found = fn(FS + "grep", sandbox_id=box, path="/many/f", pattern="x")
    assert found["truncated"] is True and 1000 < len(found["matches"]) < 4000


GREP = [
    ("a$", {}, [(1, "alpha"), (2, "beta"), (3, "gamma")]),
    ("ALPHA", {"ignore_case": True}, [(1, "alpha")]),
    ("", {"max_matches": 2}, [(1, "alpha"), (2, "beta")]),
    ("^a", {"max_line_bytes": 2}, [(1, "al…")]),
]


@pytest.mark.parametrize(("pattern", "options", "expected"), GREP)
def test_iii_Q19_grep_lines(fn: FunctionLab, box: str, pattern: str, options: Any, expected: Any) -> None:
    """Find lines without their ends, and number them from one."""
    fn.put(box, "/g/f", "alpha\nbeta\r\ngamma")
    found = fn(FS + "grep", sandbox_id=box, path="/g/f", pattern=pattern, **options)
    assert [(one["line"], one["content"]) for one in found["matches"]] == expected
    assert all(one["line_no"] == one["line"] and one["path"] == "/g/f" for one in found["matches"])


@pytest.mark.parametrize(("limit", "shown"), [(5, "héll…"), (2, "h…"), (7, "héllo!"), (0, "héllo!")])
def test_iii_grep_cuts_between_characters(fn: FunctionLab, box: str, limit: int, shown: str) -> None:
    """Cut a long line at a whole character."""
    fn.put(box, "/g/h", "héllo!")
    assert (
        fn(FS + "grep", sandbox_id=box, path="/g/h", pattern="h", max_line_bytes=limit)["matches"][0]["content"]
        == shown
    )


@pytest.mark.parametrize(("most", "truncated"), [(2, False), (1, True), (0, False)])
def test_iii_grep_truncated_only_when_it_was(fn: FunctionLab, box: str, most: int, truncated: bool) -> None:
    """Flag a cut list, and only a cut one."""
    fn.put(box, "/g/two", "x\nx\n")
    assert fn(FS + "grep", sandbox_id=box, path="/g/two", pattern="x", max_matches=most)["truncated"] is truncated


@pytest.mark.parametrize("pattern", ["(?=x)", r"(a)\1", "["])
def test_iii_grep_patterns_that_do_not_compile_are_S217(fn: FunctionLab, box: str, pattern: str) -> None:
    """Refuse look-around, back-references and nonsense."""
    fn.put(box, "/g/f", "x")
    assert fn.refused(FS + "grep", sandbox_id=box, path="/g/f", pattern=pattern).code == "S217"
    assert fn.refused(FS + "sed", sandbox_id=box, path="/g/f", pattern=pattern, replacement="").code == "S217"


def test_iii_grep_is_linear(fn: FunctionLab, box: str) -> None:
    """Answer a pattern that would take other engines forever."""
    fn.put(box, "/g/slow", "a" * 5000 + "b")
    assert fn(FS + "grep", sandbox_id=box, path="/g/slow", pattern="(a+)+$")["matches"] == []


def test_iii_D6_grep_survives_strange_trees(fn: FunctionLab, box: str) -> None:
    """Finish in a tree with links, a pipe, binary and unreadable files, and return the rest."""
    fn.sh(
        box,
        "mkdir -p /odd/d; cd /odd; echo hit > a; ln -s /odd d/loop; mkfifo pipe; ln -s none dead; "
        "printf '%100s\\0hit\\n' > bin; (head -c 9000 /dev/zero | tr '\\0' '\\n'; printf '\\0\\nhit\\n') > late; "
        "printf '\\377hit\\nhit\\n' > half",
    )
    found = fn(FS + "grep", sandbox_id=box, path="/odd", pattern="hit")
    assert [one["path"] for one in found["matches"]] == ["/odd/a", "/odd/half", "/odd/late"]
    fn.sh(box, "ln -s /odd /odd-link")
    assert fn(FS + "grep", sandbox_id=box, path="/odd-link", pattern="hit")["matches"]


GLOBS: list[tuple[str, str, str, bool]] = [
    *[("include", glob, path, True) for glob, path in (
        ("*.py", "a/b/x.py"), ("*", "a/b.c"), ("src/*.py", "src/x.py"), ("**/*.py", "x.py"), ("**/*.py", "a/b/x.py"),
        ("**/src/*.py", "src/x.py"), ("src/**/x.py", "src/a/x.py"), ("src/**", "src/a"), ("**/src/*.py", "a/src/x.py"),
        ("src/**/x.py", "src/x.py"), ("src/**/x.py", "src/a/b/x.py"), ("src/**", "src/a/b"), ("/src/*.py", "src/x.py"),
        ("[ab].py", "a.py"))],
    *[("include", glob, path, False) for glob, path in (
        ("src/*.py", "src/a/x.py"), ("{a,b}.py", "a.py"), ("node_modules", "node_modules/a.js"), ("src/*", "src/a/x.py"))],
    *[("exclude", glob, path, True) for glob, path in (
        ("node_modules", "node_modules/a.js"), ("build/", "build/o.txt"), ("src/*", "src/a/x.py"))],
    ("exclude", "build/", "build", False),
]  # fmt: skip


def test_iii_globs(fn: FunctionLab, box: str) -> None:
    """Match globs as the contract's table has it."""
    wrong = []
    for number, (kind, glob, path, hit) in enumerate(GLOBS):
        fn.put(box, f"/globs/{number}/{path}", "hit\n")
        found = fn(FS + "grep", sandbox_id=box, path=f"/globs/{number}", pattern="hit", **{f"{kind}_glob": [glob]})
        if bool(found["matches"]) is not (hit if kind == "include" else not hit):
            wrong.append((kind, glob, path))
    assert not wrong


def test_iii_grep_and_sed_shapes(fn: FunctionLab, box: str) -> None:
    """Refuse shapes that mean nothing before asking for the sandbox."""
    nobody = "6ba7b810-9dad-4ed1-80b4-00c04fd430c8"
    sed = {"sandbox_id": nobody, "pattern": "a", "replacement": "b"}
    assert fn.refused(FS + "sed", **sed).code == "S210"
    assert fn.refused(FS + "sed", **sed, path="/a", files=["/b"]).code == "S210"
    assert fn.refused(FS + "sed", **{**sed, "pattern": "", "regex": False}, path="/a").code == "S210"
    assert fn.refused(FS + "grep", sandbox_id=nobody, path="/", pattern="x", include_glob=["!a"]).code == "S210"
    assert fn.refused(FS + "grep", sandbox_id=nobody, path="/", pattern="x").code == "S002"
    refused = fn.refused(FS + "sed", sandbox_id=box, pattern="a", replacement="b", path="/tmp", recursive=False)
    assert refused.code == "S210" and refused.fix is None
    assert fn.refused(FS + "grep", sandbox_id=box, path="/none", pattern="x").code == "S211"


SED = [
    ("foo foo\nfoo\n", "foo", "bar", {}, "bar bar\nbar\n", 3),
    ("foo foo\nfoo\n", "foo", "bar", {"first_only": True}, "bar foo\nfoo\n", 1),
    ("foo\nboo", "o$", "0", {}, "fo0\nbo0", 2),
    ("foo\r\n", "o$", "0", {}, "fo0\r\n", 1),
    ("a b\nc", r"\s+", "_", {}, "a_b\nc", 1),
    ("a@b", r"(\w+)@(\w+)", "$2 at ${1}", {}, "b at a", 1),
    ("a", "(a)", "$1x", {}, "", 1),
    ("a", "(a)", "${1}x", {}, "ax", 1),
    ("5", "5", "$$5", {}, "$5", 1),
    ("a.b axb", "a.b", "$1", {"regex": False}, "$1 axb", 1),
    ("a", "A", "$5", {"regex": False, "ignore_case": True}, "$5", 1),
    ("ab", "x*", "-", {}, "-a-b-", 3),
]


@pytest.mark.parametrize(("text", "pattern", "replacement", "options", "result", "count"), SED)
def test_iii_Q19_sed_vectors(
    fn: FunctionLab, box: str, text: str, pattern: str, replacement: str, options: Any, result: str, count: int
) -> None:
    """Replace as the contract's table has it."""
    fn.put(box, "/sed/f", text)
    done = fn(FS + "sed", sandbox_id=box, files=["/sed/f"], pattern=pattern, replacement=replacement, **options)
    assert done["results"] == [{"path": "/sed/f", "replacements": count, "success": True}]
    assert done["total_replacements"] == count and fn.get(box, "/sed/f") == result


def test_iii_D9_sed_leaves_unmatched_files_alone(fn: FunctionLab, box: str) -> None:
    """Touch only files with a match, keep mode and owner, and go on after a file that fails."""
    fn.sh(
        box,
        "mkdir -p /s; cd /s; echo keep > a; ln a hard; touch -d @1000 a; echo old > b; chmod 640 b; chown 5:6 b; "
        "printf '\\377old' > bad; stat -c '%i %Y %h' a > /tmp/before",
    )
    done = fn(FS + "sed", sandbox_id=box, path="/s", pattern="old", replacement="new")
    results = {one["path"]: one for one in done["results"]}
    assert results["/s/b"] == {"path": "/s/b", "replacements": 1, "success": True}
    assert results["/s/bad"]["success"] is False and results["/s/bad"]["error"]
    assert done["total_replacements"] == 1
    assert (
        fn.sh(box, "cd /s; stat -c '%i %Y %h' a | cmp - /tmp/before && stat -c '%a %u:%g' b")["stdout"] == "640 5:6\n"
    )
    done = fn(FS + "sed", sandbox_id=box, files=["/s/none", "/s/b"], pattern="new", replacement="x")
    assert [one["success"] for one in done["results"]] == [False, True]


def test_iii_sed_tells_of_every_file(fn: FunctionLab, box: str) -> None:
    """Name each of many files."""
    fn.sh(box, "mkdir /lots; cd /lots; for i in $(seq 700); do echo a > f$i; done")
    done = fn(FS + "sed", sandbox_id=box, path="/lots", pattern="a", replacement="b")
    assert len({one["path"] for one in done["results"]}) == done["total_replacements"] == 700


def test_iii_D8_an_upload_whose_sender_dies_changes_nothing(fn: FunctionLab, box: str) -> None:
    """Keep the old file and leave no other when a caller goes away in the middle of its body."""
    import socket

    fn.put(box, "/cut/f", "old")
    target = f"/functions/{FS}write?sandbox_id={box}&path=/cut/f"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{fn.home}/daemon.sock")
        sock.sendall(f"PUT {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n".encode() + b"n" * 5000)
        until(lambda: len(fn(FS + "ls", sandbox_id=box, path="/cut")["entries"]) > 1, "it is being written")
    until(lambda: [one["name"] for one in fn(FS + "ls", sandbox_id=box, path="/cut")["entries"]] == ["f"], "no other")
    assert fn.get(box, "/cut/f") == "old"


def test_iii_many_calls_in_a_row(fn: FunctionLab, box: str) -> None:
    """Serve thousands of calls, good and bad, and hold on to nothing."""
    import http.client
    import os
    import socket

    pid = fn.start()
    before = descriptors(pid)
    count = 10_000 if os.environ.get("ATOLL_TEST_LONG") else 500
    connection = http.client.HTTPConnection("daemon", timeout=90)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(f"{fn.home}/daemon.sock")
    for number in range(count):
        body = b'{"sandbox_id": "%s", "path": "/"}' % box.encode() if number % 2 else b'{"sandbox_id": 1}'
        connection.request("POST", f"/functions/{FS}stat", body)
        response = connection.getresponse()
        response.read()
        assert response.status == (200 if number % 2 else 400)
    connection.close()
    until(lambda: descriptors(pid) <= before + 5, "no descriptor is left open")
