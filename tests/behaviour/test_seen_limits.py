"""Programs see their sandbox's limits as the size of the machine, under a kernel of the sandbox's own."""

import json

import pytest
from sandbox_lab import Lab

PYTHON = """
import json, os, pathlib
facts = dict(line.split(":") for line in open("/proc/meminfo").read().splitlines())
stat = [line for line in open("/proc/stat") if line.startswith("cpu") and line[3].isdigit()]
print(json.dumps({
    "meminfo": int(facts["MemTotal"].split()[0]) >> 10, "sysinfo": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
    "cpu_count": os.cpu_count(), "affinity": len(os.sched_getaffinity(0)), "stat": len(stat),
    "cpuinfo": open("/proc/cpuinfo").read().count("processor\\t"),
}))
"""
NODE = """
const v8 = require('v8'), os = require('os')
console.log(JSON.stringify([os.totalmem() >> 20, os.cpus().length, v8.getHeapStatistics().heap_size_limit >> 20]))
"""


@pytest.mark.parametrize(("memory", "cpus", "shown"), [(300, 1.0, 1), (640, 0.5, 1), (512, 2.0, 2)])
def test_programs_see_their_limits(lab: Lab, memory: int, cpus: float, shown: int) -> None:
    if why := lab.works("gvisor"):
        pytest.skip(why)
    with lab.sandbox(runtime="gvisor", memory_mb=memory, cpus=cpus, pids=256) as made:
        found = json.loads(made.exec(["python3", "-c", PYTHON]).stdout)
        assert found == {
            "meminfo": memory, "sysinfo": memory, "cpu_count": shown, "affinity": shown, "stat": shown, "cpuinfo": shown,
        }  # fmt: skip
        assert made.exec("nproc").stdout == f"{shown}\n"
        total, count, heap = json.loads(made.exec(["node", "-e", NODE]).stdout)
        assert (total, count) == (memory, shown) and heap < memory, heap
        assert made.exec("echo x > /proc/meminfo").exit_code != 0


def test_java_sees_the_limits(lab: Lab) -> None:
    if why := lab.works("gvisor"):
        pytest.skip(why)
    code = "class L { public static void main(String[] a) { Runtime r = Runtime.getRuntime(); " \
        "System.out.println((r.maxMemory() >> 20) + \" \" + r.availableProcessors()); } }"  # fmt: skip
    with lab.sandbox(runtime="gvisor", memory_mb=512, cpus=1, pids=256) as made:
        if made.exec("command -v java").exit_code != 0:
            pytest.skip("the image has no Java")
        made.files.write("/workspace/L.java", code)
        result = made.exec("java L.java", timeout=120)
        heap, processors = map(int, result.stdout.split())
        assert heap < 512 and processors == 1, result
