"""Manifests: what they make, what they refuse, and that a failure leaves no sandbox."""

import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.daemon import DaemonProcess
from lab.terminal import Atoll

from atoll.core.workspaces.manifest import parse
from atoll.errors import InvalidArgument, TooLarge


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[int]:
    """A git server on loopback; its port."""
    if shutil.which("git") is None:
        pytest.fail("git is needed")
    work, bare = tmp_path / "work", tmp_path / "served" / "demo.git"
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
           "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}  # fmt: skip

    def git(*words: str) -> None:
        subprocess.run(["git", *words], check=True, env=env, capture_output=True)

    git("init", "-b", "main", str(work))
    (work / "README").write_text("from git\n")
    git("-C", str(work), "add", ".")
    git("-C", str(work), "commit", "-m", "first")
    git("-C", str(work), "branch", "v2")
    bare.parent.mkdir()
    git("clone", "--bare", str(work), str(bare))
    backend = Path(subprocess.check_output(["git", "--exec-path"], text=True).strip()) / "git-http-backend"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            cgi = {
                "GIT_PROJECT_ROOT": str(bare.parent), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path, "QUERY_STRING": query,
                "REQUEST_METHOD": self.command, "CONTENT_TYPE": self.headers.get("content-type", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""), "PATH": os.environ["PATH"],
                "CONTENT_LENGTH": str(len(body)), "GIT_PROTOCOL": self.headers.get("git-protocol", ""),
                "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
            }  # fmt: skip
            done = subprocess.run([str(backend)], input=body, capture_output=True, env=cgi, timeout=60)
            head, _, answer = done.stdout.partition(b"\r\n\r\n")
            self.send_response(200)
            for line in head.decode().split("\r\n"):
                name, _, value = line.partition(": ")
                if name and name != "Status":
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_k8e_P15_k8e_D33_files_directories_and_modes(atoll: Atoll, tmp_path: Path) -> None:
    path = tmp_path / "workspace.yaml"
    path.write_text(
        "entries:\n"
        "  - dir: {path: data/in}\n"
        '  - file: {path: bin/run.sh, content: "#!/bin/sh\\necho it runs\\n", mode: 0755}\n'
        "  - file:\n      path: number\n      content: 0123\n      mode: '0600'\n"
    )
    done = atoll("sandbox", "create", "--manifest", str(path))
    assert b"entry 2/3: file bin/run.sh" in done.stderr
    session = atoll.ok("sandbox", "create", "--manifest", "-", stdin=path.read_bytes())
    assert session["entries_materialized"] == 3
    told = atoll("sandbox", "run", "--raw", "--session-id", session["session_id"],
                 "bin/run.sh; cat number; stat -c ' %a' number; test -d data/in")  # fmt: skip
    assert (told.returncode, told.stdout) == (0, b"it runs\n0123 600\n")


def test_k8e_P15_a_repository_is_cloned_inside(atoll: Atoll, daemon: DaemonProcess, repository: int) -> None:
    url = f"http://host.atoll.internal:{repository}/demo.git"
    flags = ("--host-access", str(repository), "--git-repo", url)
    made = atoll.ok("sandbox", "create", *flags, "--git-ref", "v2", "--git-path", "src/demo")
    assert made["entries_materialized"] == 1
    assert atoll.ok("sandbox", "read", made["session_id"], "/workspace/src/demo/README")["content"] == "from git\n"
    before = len(daemon.get("/v1/sandboxes")["sandboxes"])
    failed = atoll.fails("sandbox", "create", *flags, "--git-ref", "no-such-branch")
    assert "entry 1/1" in failed["detail"] and "no-such-branch" in failed["detail"]
    assert len(daemon.get("/v1/sandboxes")["sandboxes"]) == before, "the failed one is gone"


def test_k8e_D33_the_first_failure_takes_the_sandbox_along(atoll: Atoll, daemon: DaemonProcess) -> None:
    before = len(daemon.get("/v1/sandboxes")["sandboxes"])
    text = b"entries: [{file: {path: a, content: x}}, {dir: {path: a/b}}, {dir: {path: c}}]"
    failed = atoll.fails("sandbox", "create", "--manifest", "-", stdin=text)
    assert "entry 2/3" in failed["detail"]
    assert len(daemon.get("/v1/sandboxes")["sandboxes"]) == before


def test_run_fills_the_sandbox_it_creates(atoll: Atoll, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("entries: [{file: {path: hello, content: hi}}]")
    told = atoll("sandbox", "run", "--tenant", "filled", "--raw", "--manifest", str(path), "cat hello")
    assert told.stdout == b"hi"
    atoll.ok("sandbox", "destroy", "--tenant", "filled")


HOSTILE = [
    "entries: [{file: {path: ../x, content: a}}]",
    "entries: [{file: {path: a/../../x, content: a}}]",
    "entries: [{file: {path: /etc/passwd, content: a}}]",
    "entries: [{dir: {path: .}}]",
    "entries: [{dir: {path: ''}}]",
    "entries: [{dir: {path: a//b}}]",
    "entries: [{dir: {path: [a]}}]",
    'entries: [{dir: {path: "a\\0b"}}]',
    "entries: [{file: {path: a}}]",
    "entries: [{file: {path: a, content: b, owner: root}}]",
    "entries: [{file: {path: a, content: b, mode: 999}}]",
    "entries: [{file: {path: a, content: b}, dir: {path: c}}]",
    "entries: [{device: {path: a}}]",
    "entries: [{gitRepo: {path: a, repo: 'file:///etc'}}]",
    "entries: [{gitRepo: {path: a, repo: '--upload-pack=x'}}]",
    "entries: [{gitRepo: {path: a, repo: 'ext::sh -c x'}}]",
    "entries: [{gitRepo: {path: a, repo: 'https://x/y', ref: --x}}]",
    "entries: [{gitRepo: {path: a, repo: 'https://x/y', ref: a..b}}]",
    "entries: {file: 1}",
    "files: []",
    "entries: []\nmore: 1",
    "- a",
    "entries: [",
    "a: &a [*a]",
    "entries: &a [{dir: {path: x}}, *a]",
    "!!python/object/apply:os.system [true]",
    "entries: [!!python/name:os.system x]",
    "\x00",
    "[" * 5000,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_manifests_are_refused_before_anything_is_made(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(text)


def test_a_manifest_has_bounds() -> None:
    with pytest.raises(TooLarge):
        parse("entries:\n" + "  - dir: {path: a}\n" * 1001)
    with pytest.raises(TooLarge):
        parse("x" * (33 << 20))
