"""RES-08: busy loops on every core. The quota is the kernel's, and the daemon answers."""

import os

from lab.sandboxes import Lab, group_values, until


def throttled(lab: Lab, sandbox: str) -> int:
    """How often the kernel held it back; of several hierarchies only one knows."""
    seen = [dict(line.split() for line in text.splitlines()) for text in group_values(lab.mark, sandbox, "cpu.stat")]
    return max((int(fields.get("nr_throttled", 0)) for fields in seen), default=0)


def nice(pid: str) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, int(pid))
    except ProcessLookupError:
        return 0


def test_burners_are_held_and_the_daemon_answers(lab: Lab, runtime: str) -> None:
    """Two sandboxes with a tenth of a core and four loops each: both throttled, others served, priority games in vain."""
    with lab.sandbox(runtime=runtime, cpus=0.1) as one, lab.sandbox(runtime=runtime, cpus=0.1) as two:
        for made in (one, two):
            for _ in range(4):
                made.start("while :; do :; done")
            asked = made.run("import os\ntry: os.nice(-20); print('done')\nexcept OSError: pass", timeout=60)
            assert runtime == "gvisor" or "done" not in asked.stdout  # gVisor's own kernel counts for nothing outside
            assert all(
                nice(pid) >= 0 for text in group_values(lab.mark, made.id, "cgroup.procs") for pid in text.split()
            )
        until(lambda: throttled(lab, one.id) > 0 and throttled(lab, two.id) > 0, "both are throttled")
        for _ in range(10):
            assert lab.ask("GET", "/v1/health")[0] == 200
        with lab.sandbox(runtime="container") as third:
            assert third.exec("echo served").stdout == "served\n"
