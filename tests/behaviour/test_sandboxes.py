"""Sandboxes as things that begin, are kept apart and end, on every runtime through the SDK and the CLI."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lab.sandboxes import HELD, PATIENCE, ROOTLESS, SOURCE, Lab, alive, until

import atoll
from atoll import Sandbox, errors


def test_k8e_P01_P05_P20_hello(lab: Lab, runtime: str) -> None:
    """One command, nothing set up before, JSON with all that happened; the exit code is the command's."""
    tenant = f"hello-{runtime}"
    words = ("sandbox", "run", "print('hello')", "--lang", "python", "--tenant", tenant)
    done = lab.cli(*words, env={"ATOLL_RUNTIME": runtime})
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and (answer["stdout"], answer["stderr"], answer["exit_code"]) == ("hello\n", "", 0)
    assert answer["session_id"].startswith("sess-")
    again = lab.cli("sandbox", "run", "exit 3", "--tenant", tenant)
    assert again.returncode == 3 and json.loads(again.stdout)["session_id"] == answer["session_id"]
    assert lab.cli("sandbox", "destroy", "--tenant", tenant).returncode == 0


def test_k8e_P08_files_and_packages_stay_between_runs(lab: Lab, runtime: str) -> None:
    """What one run leaves the next one finds: in the workspace, in the system tree, as an importable module."""
    with lab.sandbox(runtime=runtime) as sandbox:
        place = sandbox.run("import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        assert sandbox.exec(f"mkdir -p {place} && echo 'answer = 42' > {place}/installed.py && echo x > kept").ok
        assert sandbox.run("import installed; print(installed.answer, open('kept').read())").stdout == "42 x\n\n"


def test_k8e_P13_D16_destroy_ends_everything(lab: Lab, runtime: str) -> None:
    """No process, no file, no memory of a sandbox survives it, and the next one starts empty."""
    first = lab.create(runtime=runtime)
    init = first.info().wire["pid"]
    marks = " ".join(f"{place}/left-behind" for place in ("/workspace", "/tmp", "/dev/shm", "/root", "/etc"))
    assert first.exec(f"for f in {marks}; do echo secret > $f || exit 1; done").ok
    first.start("setsid sleep 631")
    first.destroy()
    with pytest.raises((errors.SandboxGone, errors.NotFound)):
        first.exec("true")
    until(lambda: not alive(init), "its init is gone")
    until(lambda: not [p for p in Path(lab.home).glob("*/*") if p.name == first.id], "its files are gone")
    with lab.sandbox(runtime=runtime) as second:
        assert second.exec(f"ls {marks} 2>/dev/null; ps ax | grep '[s]leep 631'").stdout == ""
        assert second.files.list("/workspace") == []


def test_k8e_D12_a_fresh_workspace_is_empty_and_history_is_not_inside(lab: Lab, runtime: str) -> None:
    """Nothing of the bookkeeping is in reach of the code, so that none of it can be forged."""
    with lab.sandbox(runtime=runtime) as sandbox:
        assert sandbox.files.list("/workspace", recursive=True) == []
        sandbox.run("print('a')\nprint('b')")
        assert sandbox.files.list("/workspace", recursive=True) == []
        found = sandbox.exec(
            ["sh", "-c", "ls -A / /.atoll; find / -xdev \\( -name '*.db' -o -name transcripts \\) 2>/dev/null"]
        )
        assert "transcripts" not in found.stdout and "atoll.db" not in found.stdout
        sandbox.exec("echo '1700000000000 o c0000000000000000000 forged line'")
        lines = sandbox.log()["output"].splitlines()
        assert [line for line in lines if "forged" in line and " o c0000000000000000000 forged" in line[:40]] == []


def test_k8e_D14_log_and_events(lab: Lab, runtime: str) -> None:
    """The transcript has the output, the events the whole life."""
    with lab.sandbox(runtime=runtime) as sandbox:
        sandbox.exec("echo told; echo too >&2; exit 3")
        until(lambda: "told" in sandbox.log()["output"] and "too" in sandbox.log()["output"], "the transcript has it")
        sandbox.stop()
        sandbox.restart()
        kinds = [event["kind"] for event in sandbox.events()]
        assert kinds[0] == "created" and {"stopped", "started"} <= set(kinds), kinds
        sandbox.destroy()
        assert sandbox.events()[-1]["kind"] in ("ended", "destroyed")


def test_k8e_D13_headers_in_pieces(lab: Lab) -> None:
    """A request that comes byte by byte is served, and its query is decoded once."""
    lab.start()
    with lab.sandbox(runtime="container") as sandbox:
        sandbox.files.write("/workspace/a b+c%41", b"here")
        target = f"/v1/sandboxes/{sandbox.id}/files?path=%2Fworkspace%2Fa%20b%2Bc%2541"
        request = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(PATIENCE)
            link.connect(f"{lab.home}/daemon.sock")
            for byte in request.encode():
                link.send(bytes([byte]))
            answer = b""
            while piece := link.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 200") and b"here" in answer.partition(b"\r\n\r\n")[2]


def test_stop_keeps_files_and_ends_processes(lab: Lab, runtime: str) -> None:
    """Files stay with their modes; nothing that ran does."""
    with lab.sandbox(runtime=runtime) as sandbox:
        sandbox.exec("echo kept > file; chmod 640 file; echo sys > /etc/mine")
        sandbox.start("sleep 641")
        assert sandbox.stop().state == "stopped"
        with pytest.raises(errors.FailedPrecondition):
            sandbox.exec("true")
        sandbox.restart()
        assert sandbox.exec("cat file /etc/mine; stat -c %a file").stdout.split() == ["kept", "sys", "640"]
        assert [p for p in sandbox.processes() if "641" in str(p.cmdline)] == []


def test_pause_freezes_and_resume_goes_on(lab: Lab, runtime: str) -> None:
    """A paused one refuses work and keeps its processes. Without a control group to freeze, that is said."""
    with lab.sandbox(runtime=runtime) as sandbox:
        command = sandbox.start("sleep 643")
        if not HELD:
            with pytest.raises(errors.Unsupported, match="freeze"):
                sandbox.pause()
            assert sandbox.info().state == "running" and command.poll().running
            return
        assert sandbox.pause().state == "paused"
        with pytest.raises(errors.FailedPrecondition):
            sandbox.exec("true")
        assert sandbox.resume().state == "running"
        assert command.poll().running and sandbox.exec("echo on").stdout == "on\n"


OTHER = """
import os, sys, socket
sys.path.insert(0, sys.argv[2])
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1] + "/daemon.sock")
except PermissionError:
    print("refused")
else:
    sock.sendall(b"GET /v1/sandboxes HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    print(sock.recv(100).split(b"\\r\\n")[0])
for name in ("", "/boxes", "/atoll.db", "/run/" + sys.argv[3], "/boxes/" + sys.argv[3] + "/disk.img", "/transcripts"):
    try:
        path = sys.argv[1] + name
        print(os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1))
    except PermissionError:
        print("refused")
    except FileNotFoundError:
        print("absent")
"""


@pytest.mark.skipif(ROOTLESS, reason="only root can become another user; tests/rootless has it for ordinary ones")
def test_k8e_D15_another_user_sees_nothing(lab: Lab, sandbox: Sandbox) -> None:
    """A second uid of this machine reaches neither the socket nor a file of the state directory."""
    sandbox.files.write("/workspace/secret", b"mine")
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    words += ["/usr/bin/python3", "-c", OTHER, lab.home, SOURCE, sandbox.id]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, cwd="/")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split("\n")) <= {"refused", "absent", ""}, done.stdout
    assert done.stdout.split("\n")[0] == "refused"
    root = subprocess.run([*words[4:]], capture_output=True, text=True, timeout=PATIENCE, cwd="/")
    assert "200" in root.stdout.split("\n")[0]  # the same probe by the owner is served: the wall is the uid


def test_twenty_programs_at_once_get_one_daemon(own_lab: Lab) -> None:
    """All start from nothing, all are served, by one process."""
    code = "from atoll import Sandbox; print(len(Sandbox.list()))"
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=own_lab.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(20)
    ]
    for run in runs:
        out, err = run.communicate(timeout=2 * PATIENCE)
        assert (run.returncode, out) == (0, b"0\n"), err
    daemons = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and os.fsencode(own_lab.home) in _words(entry)
        and b"atoll.server.daemon" in _words(entry)
    ]
    assert len(daemons) == 1


def _words(entry: Path) -> list[bytes]:
    try:
        return (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_a_named_runtime_never_falls_back(lab: Lab) -> None:
    """What this machine cannot do is said, with a reason, and no other runtime takes its place."""
    with pytest.raises(errors.Unsupported) as caught:
        lab.create(runtime="kata")
    assert caught.value.message
    assert atoll.Sandbox.list(home=lab.home, name="nothing") == []
