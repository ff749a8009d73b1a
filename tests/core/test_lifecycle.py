"""The life of a sandbox: states, ends and their reasons, names, and who may see it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from lab.daemon import Box, DaemonProcess, Failed, until


def test_destroy_is_recorded_and_can_be_repeated(daemon: DaemonProcess) -> None:
    box = daemon.create(env={"SECRET": "hunter2"})
    assert box.info()["env_keys"] == ["SECRET"]
    ended = box.destroy()
    assert ended["state"] == "ended" and ended["end"]["kind"] == "destroyed" and ended["end"]["by"] == "uid:0"
    assert box.destroy()["end"] == ended["end"]
    with pytest.raises(Failed) as caught:
        box.exec(["true"])
    assert caught.value.code == "sandbox_gone" and caught.value.error["details"]["reason"] == "destroyed"
    for name in ("atoll.db", "atoll.db-wal"):
        path = daemon.home / name
        if name == "atoll.db-wal" or not path.exists():
            continue
        assert b"hunter2" not in path.read_bytes()
    assert box.id not in [s["id"] for s in daemon.get("/v1/sandboxes")["sandboxes"]]
    assert box.id in [s["id"] for s in daemon.get("/v1/sandboxes?state=ended")["sandboxes"]]


def test_names_and_aliases(daemon: DaemonProcess) -> None:
    box = daemon.create(name="first", alias="sess:1")
    assert daemon.get("/v1/sandboxes/first")["id"] == daemon.get("/v1/sandboxes/sess:1")["id"] == box.id
    assert box.info()["expires_at"] is None and box.info()["idle_timeout_s"] is None
    for taken in ({"name": "first"}, {"alias": "sess:1"}):
        with pytest.raises(Failed) as caught:
            daemon.post("/v1/sandboxes", taken)
        assert caught.value.code == "already_exists"
    assert [s["id"] for s in daemon.get("/v1/sandboxes?name=first")["sandboxes"]] == [box.id]
    box.destroy()
    again = daemon.create(name="first", alias="sess:1")
    assert daemon.get("/v1/sandboxes/first")["id"] == again.id
    again.destroy()


def test_stop_keeps_the_disk_and_start_brings_it_back(daemon: DaemonProcess) -> None:
    box = daemon.create()
    box.write("/workspace/kept", b"still here")
    box.write("/etc/kept", b"too")
    assert daemon.post(f"{box.path}/stop")["state"] == "stopped"
    with pytest.raises(Failed) as caught:
        box.exec(["true"])
    assert caught.value.code == "failed_precondition"
    assert daemon.post(f"{box.path}/stop")["state"] == "stopped"
    assert daemon.post(f"{box.path}/start")["state"] == "running"
    assert box.read("/workspace/kept") == b"still here" and box.read("/etc/kept") == b"too"
    daemon.post(f"{box.path}/stop")
    assert box.destroy()["state"] == "ended"


def test_pause_freezes_and_resume_thaws(daemon: DaemonProcess) -> None:
    box = daemon.create()
    command = box.background("while :; do echo x; sleep 0.02; done")
    until(lambda: box.command(command)["stdout_bytes"] > 4, "it runs")
    assert daemon.post(f"{box.path}/pause")["state"] == "paused"
    with pytest.raises(Failed) as caught:
        box.exec(["true"])
    assert caught.value.code == "failed_precondition"
    assert daemon.post(f"{box.path}/resume")["state"] == "running"
    before = box.command(command)["stdout_bytes"]
    until(lambda: box.command(command)["stdout_bytes"] > before, "it runs on")
    daemon.post(f"{box.path}/pause")
    assert box.destroy()["state"] == "ended"


def test_a_lifetime_ends_it_and_says_so(daemon: DaemonProcess) -> None:
    box = daemon.create(lifetime_s=1.5)
    command = box.background("sleep 600")
    ended = until(lambda: (i := box.info())["state"] == "ended" and i, "it expires")
    assert ended["end"]["kind"] == "expired"
    assert box.command(command)["status"] == "lost"


def test_idle_ends_it_but_never_while_it_works(daemon: DaemonProcess) -> None:
    """One works in the background, one for a caller who waits. Both are given their second of idleness while they work."""
    alone, awaited = daemon.create(), daemon.create()
    command = alone.background("sleep 3")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(awaited.exec, "touch /tmp/begun; sleep 3; echo done")
        until(lambda: awaited.exec("test -e /tmp/begun")["exit_code"] == 0, "the call has begun")
        for box in (alone, awaited):
            daemon.post(f"{box.path}/extend", {"idle_timeout_s": 1})
        assert answer.result()["stdout"] == "done\n"
    assert alone.ended(command)["exit_code"] == 0
    for box in (alone, awaited):
        ended = until(lambda box=box: (i := box.info())["state"] == "ended" and i, "it is idle")
        assert ended["end"]["kind"] == "idle"


def test_extend_moves_the_end(daemon: DaemonProcess) -> None:
    box = daemon.create(lifetime_s=5)
    later = daemon.post(f"{box.path}/extend", {"lifetime_s": 500})
    assert later["expires_at"] > later["created_at"] + 400
    assert daemon.post(f"{box.path}/extend", {"lifetime_s": None, "idle_timeout_s": None})["expires_at"] is None
    with pytest.raises(Failed) as caught:
        daemon.post(f"{box.path}/extend", {"lifetime_s": -1})
    assert caught.value.code == "invalid_argument"
    box.destroy()


def test_out_of_memory_is_told(daemon: DaemonProcess) -> None:
    box = daemon.create(limits={"memory_mb": 96})
    result = box.run("x = bytearray(400 << 20)\nprint(len(x))")
    assert result["oom"] and result["signal"] == 9 and result["exit_code"] == 137
    assert "out of memory" in result["stderr"]
    assert box.exec("echo alive")["stdout"] == "alive\n"
    box.destroy()


def test_a_crash_is_told(daemon: DaemonProcess) -> None:
    box = daemon.create()
    os.kill(box.info()["pid"], 9)
    ended = until(lambda: (i := box.info())["state"] == "ended" and i, "the crash is noticed")
    assert ended["end"]["kind"] in ("crashed", "lost")
    with pytest.raises(Failed) as caught:
        box.exec(["true"])
    assert caught.value.code == "sandbox_gone"


def test_another_user_is_refused(daemon: DaemonProcess, box: Box) -> None:
    assert (daemon.home / "daemon.sock").stat().st_mode & 0o777 == 0o600
    script = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: s.connect(sys.argv[1])\n"
        "except PermissionError: print('refused')\n"
    )
    sock = str(daemon.home / "daemon.sock")
    assert subprocess.run([sys.executable, "-c", script, sock], capture_output=True, text=True).stdout == "refused\n"
    late = (  # connects as root, but the kernel tells who it was at that time; a socket handed down is not a door
        "import os, socket, sys\n"
        "os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect(sys.argv[1])\n"
        "except PermissionError: print('refused')\n"
    )
    assert subprocess.run([sys.executable, "-c", late, sock], capture_output=True, text=True).stdout == "refused\n"


def test_usage_of_twenty_at_once(daemon: DaemonProcess) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(number: int) -> str:
        box = daemon.create()
        try:
            return str(box.exec(f"echo {number}")["stdout"])
        finally:
            box.destroy()

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(one, range(20))) == [f"{n}\n" for n in range(20)]
