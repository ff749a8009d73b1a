"""LIF-06: after any number of lives the machine and the daemon are as they were."""

from pathlib import Path

from lab.sandboxes import LONG, Lab, descriptors, left, until


def numbers(lab: Lab, daemon: int) -> dict[str, int]:
    found = {kind: len(items) for kind, items in left(lab.mark, lab.home).items()}
    found["descriptors"] = descriptors(daemon)
    found["children"] = sum(len(p.read_text().split()) for p in Path(f"/proc/{daemon}/task").glob("*/children"))
    found["interfaces"] = len(list(Path("/sys/class/net").iterdir()))
    return found


def test_cycles_leave_no_drift(own_lab: Lab) -> None:
    """Create, run, start something, destroy: processes, mounts, loop devices, groups, directories, descriptors, children."""
    daemon = own_lab.start()

    def live(number: int) -> None:
        made = own_lab.create(runtime="container", network=number % 2 == 0)
        made.exec("echo x > /workspace/f")
        made.start("setsid sleep 673")
        if number % 3 == 0:
            made.stop()
            made.restart()
        made.destroy()
        made.close()

    for number in range(4):  # what is made once (image, router, pool) is made here
        live(number)
    before = until(lambda: (n := numbers(own_lab, daemon))["directories"] == 0 and n, "the first ones are gone")
    for number in range(1000 if LONG else 12):
        live(number)

    def settled() -> bool:
        now = numbers(own_lab, daemon)
        return all(now[kind] <= before[kind] for kind in now if kind != "interfaces")

    try:
        until(settled, "no drift")
    except AssertionError:
        raise AssertionError(f"before {before}, now {numbers(own_lab, daemon)}") from None
