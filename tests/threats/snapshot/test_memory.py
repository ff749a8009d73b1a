"""SNP-01 to SNP-11 for saved memory: what goes on in a fork, what is new in it, what is in the file, what is refused."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.daemon import Box, DaemonProcess, Failed, running_daemon
from lab.memory import gvisor_saves
from lab.waiting import until

pytestmark = gvisor_saves
CANARY = "canary-5f1c"
HEX = "0123456789abcdef"
# A program that has used every generator before, and tells once what it draws when /workspace/go is there.
DRAW = """
import json, os, random, ssl, time, uuid
os.urandom(8), ssl.RAND_bytes(8), uuid.uuid4(), random.random()
print("ready", flush=True)
while not os.path.exists("/workspace/go"):
    time.sleep(0.02)
raw = os.open("/dev/urandom", os.O_RDONLY)
print(json.dumps([os.urandom(16).hex(), os.read(raw, 16).hex(), str(uuid.uuid4())]), flush=True)
time.sleep(600)
"""
FRESH = "import os,random,uuid,ssl; print(random.random(), uuid.uuid4(), os.urandom(8).hex(), ssl.RAND_bytes(8).hex())"
# Both ends of a connection, which then says what becomes of a byte sent over it.
TALK = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far, _ = listener.accept()
print("ready", flush=True)
while not os.path.exists("/workspace/go"):
    time.sleep(0.02)
try:
    near.sendall(b"x"); near.sendall(b"y"); print("got", far.recv(1).decode(), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
time.sleep(600)
"""
# Writes a number to a file, and only when it is on the disk shows it in memory.
COUNT = """
import os
open("/workspace/pid", "w").write(str(os.getpid()))
print("ready", flush=True)
n = 0
file = open("/workspace/log", "w")
while True:
    n += 1
    file.write(f"{n}\\n")
    file.flush()
    os.fsync(file.fileno())
    open("/dev/shm/n.new", "w").write(str(n))
    os.rename("/dev/shm/n.new", "/dev/shm/n")
"""
NUMBERS = "import time\nfor n in range(1, 501):\n    print(n, flush=True)\n    time.sleep(0.01)"
ADDRESS = """
import socket
found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
found.connect(("203.0.113.1", 9))
print(found.getsockname()[0])
"""


@pytest.fixture
def parent(daemon: DaemonProcess) -> Iterator[Box]:
    box = daemon.create(runtime="gvisor")
    yield box
    box.destroy()


def fork(box: Box, count: int = 1) -> list[Box]:
    made = box.daemon.post(f"{box.path}/fork", {"count": count})["sandboxes"]
    return [Box(box.daemon, one["id"]) for one in made]


def restored(daemon: DaemonProcess, name: str, **fields: object) -> Box:
    return Box(daemon, daemon.post(f"/v1/checkpoints/{name}/restore", fields)["id"])


def gone(daemon: DaemonProcess) -> None:
    for one in daemon.get("/v1/checkpoints")["checkpoints"]:
        daemon.delete(f"/v1/checkpoints/{one['name']}")
    assert not list((daemon.home / "memories").glob("*"))


def started(box: Box, code: str) -> str:
    box.write("/workspace/program.py", code.encode())
    command = box.background("python3 /workspace/program.py")
    until(lambda: "ready" in box.command(command)["stdout"])
    return command


def told(box: Box, command: str) -> str:
    """The second line of a program that waits for /workspace/go."""
    box.exec("touch /workspace/go")
    until(lambda: len(box.command(command)["stdout"].splitlines()) > 1)
    return str(box.command(command)["stdout"].splitlines()[1])


def test_snp01_no_two_forks_draw_the_same(parent: Box) -> None:
    command = started(parent, DRAW)
    children = fork(parent, 3)
    drawn = [json.loads(told(box, command)) for box in (parent, *children)]
    for kind in zip(*drawn, strict=True):
        assert len(set(kind)) == 4, kind
    fresh = [box.exec(["python3", "-c", FRESH])["stdout"].split() for box in (parent, *children)]
    for kind in zip(*fresh, strict=True):
        assert len(set(kind)) == 4, kind
    told_apart = {box.exec("cat /.atoll/host/generation")["stdout"] for box in (parent, *children)}
    assert len(told_apart) == 4, "by this a program that runs on learns that it has to seed its own generator again"
    for child in children:
        child.destroy()


def test_snp02_the_clock_is_the_hosts(daemon: DaemonProcess, parent: Box) -> None:
    daemon.post(f"{parent.path}/checkpoints", {"name": "clock"})
    time.sleep(2)
    child = restored(daemon, "clock", lifetime_s=100)
    before = time.time()
    inside = float(child.exec("date +%s.%N")["stdout"])
    assert before - 0.05 <= inside <= time.time() + 0.05
    left = child.info()["expires_at"] - time.time()
    assert 0 < left <= 100
    child.destroy()
    gone(daemon)


def test_snp03_nothing_of_the_memory_can_be_read(daemon: DaemonProcess) -> None:
    box = daemon.create(runtime="gvisor", env={"TOKEN": CANARY})
    box.background(f"exec sleep 600 {CANARY}-argument")
    box.exec(f"echo {CANARY} > /workspace/file; printf {CANARY} > /dev/shm/file")
    daemon.post(f"{box.path}/checkpoints", {"name": "sealed"})
    files = [path for part in ("memories", "checkpoints") for path in (daemon.home / part).rglob("*") if path.is_file()]
    assert len(files) >= 2
    for path in files:
        assert CANARY.encode() not in path.read_bytes(), path
        assert path.stat().st_mode & 0o077 == 0
    child = restored(daemon, "sealed")
    assert child.exec("cat /dev/shm/file; echo $TOKEN")["stdout"] == f"{CANARY}{CANARY}\n"
    for one in (box, child):
        one.destroy()
    gone(daemon)


def test_snp04_names_addresses_and_connections_are_new(parent: Box) -> None:
    command = started(parent, TALK)
    children = fork(parent, 3)
    everyone = (parent, *children)
    assert len({box.exec("hostname")["stdout"] for box in everyone}) == 4
    assert len({box.exec(["python3", "-c", ADDRESS])["stdout"] for box in everyone}) == 4
    for child in children:
        assert told(child, command) in ("ConnectionResetError", "BrokenPipeError")
        kinds = {event["kind"]: event for event in parent.daemon.get(f"{child.path}/events")["events"]}
        assert kinds["forked"]["connections"] == "reset" and kinds["forked"]["of"] == parent.id
        child.destroy()
    assert told(parent, command) == "got x", "the parent's own connections go on"


def test_snp05_disk_and_memory_are_of_one_moment(parent: Box) -> None:
    """A writer appends a number to a file, flushes, and only then shows it in memory: a fork's file is never behind its memory."""
    started(parent, COUNT)
    until(lambda: parent.exec("cat /dev/shm/n")["exit_code"] == 0)
    for _ in range(3):
        (child,) = fork(parent)
        script = "kill -STOP $(cat /workspace/pid); cat /dev/shm/n; echo; cat /workspace/log"
        shown = child.exec(script)["stdout"].split()
        memory, lines = int(shown[0]), [int(line) for line in shown[1:]]
        assert lines == list(range(1, len(lines) + 1)), "no lost or torn record"
        assert len(lines) - memory in (0, 1)
        child.destroy()


def test_snp06_an_edited_cut_or_swapped_file_is_refused(daemon: DaemonProcess, parent: Box) -> None:
    def sealed(name: str) -> Path:
        before = set((daemon.home / "memories").glob("*"))
        daemon.post(f"{parent.path}/checkpoints", {"name": name})
        (made,) = set((daemon.home / "memories").glob("*")) - before
        return made / "sealed"

    one, other = sealed("one"), sealed("other")
    good = one.read_bytes()
    middle = len(good) // 2
    bad = {
        "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "cut": good[: len(good) - 100],
        "grown": good + b"x" * 40,
        "swapped": other.read_bytes(),
        "empty": b"",
    }
    running = {box["id"] for box in daemon.get("/v1/sandboxes")["sandboxes"]}
    for what, data in bad.items():
        one.write_bytes(data)
        with pytest.raises(Failed) as refused:
            restored(daemon, "one")
        assert refused.value.code == "failed_precondition", what
    assert {box["id"] for box in daemon.get("/v1/sandboxes")["sandboxes"]} == running
    one.write_bytes(good)
    restored(daemon, "one").destroy()
    gone(daemon)


def test_snp08_names_approvals_and_ports_stay_behind(daemon: DaemonProcess) -> None:
    box = daemon.create(runtime="gvisor", name="first", alias="also")
    daemon.post(f"{box.path}/approvals", {"action": "a"})
    (child,) = fork(box)
    info = child.info()
    assert info["id"] != box.id and info["name"] is None and info["parent_id"] is None
    assert [one["sandbox_id"] for one in daemon.get("/v1/approvals")["approvals"]] == [box.id]
    assert daemon.get("/v1/sandboxes/also")["id"] == box.id
    assert daemon.get(f"{child.path}/exposures")["exposures"] == []
    box.destroy()
    assert child.exec("echo on")["stdout"] == "on\n", "it does not depend on where it came from"
    child.destroy()


def test_snp09_forks_are_bounded(daemon: DaemonProcess, parent: Box) -> None:
    for count in (0, 33, -1):
        with pytest.raises(Failed):
            fork(parent, count)
    (child,) = fork(parent)
    (grandchild,) = fork(child)
    child.destroy()
    assert grandchild.exec("echo on")["stdout"] == "on\n"
    grandchild.destroy()
    with running_daemon("[sandboxes]\nmax_count = 3\n") as tight:
        box = tight.create(runtime="gvisor")
        with pytest.raises(Failed):
            fork(box, 8)
        until(lambda: [one["id"] for one in tight.get("/v1/sandboxes")["sandboxes"]] == [box.id])
        assert box.exec("echo on")["stdout"] == "on\n"
        assert not list((tight.home / "memories").glob("*"))
        box.destroy()


def test_snp10_what_is_deleted_is_gone(daemon: DaemonProcess, parent: Box) -> None:
    daemon.post(f"{parent.path}/checkpoints", {"name": "short"})
    with pytest.raises(Failed):
        daemon.post(f"{parent.path}/checkpoints", {"name": "short"})
    child = restored(daemon, "short")
    assert daemon.delete("/v1/checkpoints/short")["freed_bytes"] > 0
    assert not list((daemon.home / "memories").glob("*"))
    with pytest.raises(Failed) as refused:
        restored(daemon, "short")
    assert refused.value.code == "not_found"
    assert child.exec("echo on")["stdout"] == "on\n"
    child.destroy()


def test_snp11_a_fork_reaches_no_more_than_its_parent_may_now(daemon: DaemonProcess) -> None:
    box = daemon.create(runtime="gvisor", hosts=["example.com", "example.org"])
    daemon.post(f"{box.path}/hosts", {"hosts": ["example.com"]})
    daemon.post(f"{box.path}/checkpoints", {"name": "narrow"})
    child = restored(daemon, "narrow")
    assert child.info()["hosts"] == ["example.com"]
    closed = restored(daemon, "narrow", network=False)
    assert closed.info()["policy"]["network"] == "none"
    for one in (box, child, closed):
        one.destroy()
    gone(daemon)


def test_a_runtime_that_cannot_says_which_can(daemon: DaemonProcess) -> None:
    box = daemon.create(runtime="container")
    for verb in ("fork", "checkpoints"):
        with pytest.raises(Failed) as refused:
            daemon.post(f"{box.path}/{verb}")
        assert refused.value.code == "unsupported"
    box.destroy()


def test_a_command_streams_on_while_its_sandbox_is_saved(parent: Box) -> None:
    heard: list[bytes] = []

    def listen() -> None:
        for kind, data in parent.daemon.stream(
            f"{parent.path}/exec", {"argv": ["python3", "-c", NUMBERS], "timeout_ms": 0}
        ):
            heard.append(data if kind == 1 else b"")

    listener = threading.Thread(target=listen)
    listener.start()
    until(lambda: len(heard) > 3)
    children = fork(parent, 2)
    listener.join(120)
    assert b"".join(heard).split() == [b"%d" % n for n in range(1, 501)]
    for child in children:
        child.destroy()


def test_destroy_while_saving_leaves_nothing(daemon: DaemonProcess) -> None:
    box = daemon.create(runtime="gvisor")
    failed: list[BaseException] = []

    def save() -> None:
        try:
            daemon.post(f"{box.path}/checkpoints", {"name": "late"})
        except Failed as error:
            failed.append(error)

    saver = threading.Thread(target=save)
    saver.start()
    until(lambda: list((daemon.home / "memories").glob("*")) or failed)
    box.destroy()
    saver.join(120)
    assert box.info()["state"] == "ended"
    gone(daemon)


@pytest.mark.parametrize("moment", ["half", "sealed"])
def test_a_daemon_killed_while_saving_leaves_the_old_one_or_nothing(moment: str) -> None:
    with running_daemon() as own:
        box = own.create(runtime="gvisor")
        box.exec("head -c 80000000 /dev/urandom > /dev/shm/large; echo kept > /dev/shm/small")
        own.post(f"{box.path}/checkpoints", {"name": "old"})
        memories = own.home / "memories"
        before = set(memories.glob("*"))
        saver = threading.Thread(target=_quietly, args=(own, f"{box.path}/checkpoints", {"name": "old", "force": True}))
        saver.start()
        shape = "*.new" if moment == "half" else "*.new/sealed"
        until(lambda: list(memories.glob(shape)) or not saver.is_alive())
        own.kill()
        saver.join(120)
        own.start()
        assert box.exec("cat /dev/shm/small")["stdout"] == "kept\n", "the sandbox goes on"
        assert len(set(memories.glob("*"))) == 1 and [
            one["name"] for one in own.get("/v1/checkpoints")["checkpoints"]
        ] == ["old"]
        child = restored(own, "old")
        assert child.exec("cat /dev/shm/small")["stdout"] == "kept\n"
        assert before
        for one in (box, child):
            one.destroy()


def _quietly(daemon: DaemonProcess, path: str, fields: dict) -> None:
    try:
        daemon.post(path, fields)
    except (Failed, OSError, EOFError, ValueError, json.JSONDecodeError):
        pass
