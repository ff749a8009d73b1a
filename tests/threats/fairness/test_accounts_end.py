"""What an owner holds in the daemon has a cap and a typed error there; when everything is destroyed nobody holds anything."""

import threading
from collections.abc import Iterator

import pytest
from lab.daemon import DaemonProcess, Failed, running_daemon, until
from lab.sandboxes import RUNTIMES

MIB = 1 << 20
CONFIG = "[pool]\nfloor = 0\nceiling = 0\n[accounts.sandbox]\nmemory_mb = 24\n[accounts.owner]\nmemory_mb = 40\n"
PRINT = "head -c {size} /dev/zero | tr '\\0' x"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon(CONFIG) as made:
        yield made


def held(daemon: DaemonProcess, kind: str) -> int:
    """What all together hold of a kind."""
    return int(daemon.get("/v1/accounts")["accounts"].get("total", {}).get(kind, 0))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_output_of_foreground_commands_is_charged_and_refused_at_the_cap(daemon: DaemonProcess, runtime: str) -> None:
    box = daemon.create(runtime=runtime)
    for _ in range(4):  # what ended before makes room
        assert len(box.exec(PRINT.format(size=10 * MIB), output_limit=16 * MIB)["stdout"]) == 10 * MIB
    codes: list[str] = []

    def ask() -> None:
        try:
            box.exec(PRINT.format(size=15 * MIB) + "; exec sleep 5", output_limit=16 * MIB, timeout_ms=120_000)
            codes.append("")
        except Failed as failed:
            codes.append(failed.code)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    until(lambda: held(daemon, "memory") > 10 * MIB, "output under way is charged")
    for thread in asking:
        thread.join()
    assert codes.count("exhausted") >= 3, codes
    assert held(daemon, "memory") <= 24 * MIB
    assert box.exec("echo well")["stdout"] == "well\n"
    until(lambda: all(c["status"] != "running" for c in daemon.get(f"{box.path}/commands")["commands"]), "all ended")
    box.destroy()
    until(lambda: daemon.get("/v1/accounts") == {"accounts": {}}, "all accounts are zero")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_all_accounts_are_zero_when_everything_is_destroyed(daemon: DaemonProcess, runtime: str) -> None:
    """Memory, threads, disk, connections and kept output. Audit bytes of a local user are not charged; those of a key stay for
    their day, because the log itself stays."""
    box = daemon.create(runtime=runtime)
    box.exec(PRINT.format(size=300_000))
    box.ended(box.background(PRINT.format(size=2 * MIB)))
    box.background("cd /workspace && echo hi > index.html && exec python3 -m http.server 8000")
    until(lambda: box.exec("exec 3<>/dev/tcp/127.0.0.1/8000")["exit_code"] == 0, "the server listens")
    daemon.post(f"{box.path}/exposures", {"port": 8000})
    box.write("/workspace/f", bytes(MIB))
    daemon.post(f"{box.path}/snapshots", {"name": "kept"})
    box.files("grep", path="/workspace", pattern="h")
    accounts = daemon.get("/v1/accounts")["accounts"]
    assert {"memory", "disk", "output"} <= set(accounts[f"sandbox {box.id}"]), accounts
    box.destroy()
    daemon.delete("/v1/snapshots/kept")
    until(lambda: daemon.get("/v1/accounts") == {"accounts": {}}, "all accounts are zero")
