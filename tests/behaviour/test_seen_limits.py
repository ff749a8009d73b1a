"""Programs see their sandbox's limits as the size of the machine."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.sandboxes import ENGINE, HELD, NO_SPARES, ROOTLESS, RUNTIMES, Lab

PYTHON = """
import json, os, pathlib
facts = dict(line.split(":") for line in open("/proc/meminfo").read().splitlines())
stat = [line for line in open("/proc/stat") if line.startswith("cpu") and line[3].isdigit()]
print(json.dumps({
    "meminfo": int(facts["MemTotal"].split()[0]) >> 10, "available": int(facts["MemAvailable"].split()[0]) >> 10,
    "sysinfo": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
    "cpu_count": os.cpu_count(), "affinity": len(os.sched_getaffinity(0)), "stat": len(stat),
    "cpuinfo": open("/proc/cpuinfo").read().count("processor\\t"),
}))
"""
NODE = """
const v8 = require('v8'), os = require('os')
console.log(JSON.stringify([os.totalmem() >> 20, os.cpus().length, v8.getHeapStatistics().heap_size_limit >> 20]))
"""
JAVA = """class L { public static void main(String[] a) { Runtime r = Runtime.getRuntime();
System.out.println((r.maxMemory() >> 20) + " " + r.availableProcessors()); } }"""
# What a program reads in its control groups, in the one layout or the other.
GROUPS = """
import json, os
top = "/sys/fs/cgroup"
def read(*names):
    return next((open(f"{top}/{name}").read().split() for name in names if os.path.exists(f"{top}/{name}")), None)
print(json.dumps({
    "memory": read("memory.max", "memory/memory.limit_in_bytes"), "used": read("memory.current", "memory/memory.usage_in_bytes"),
    "cpu": read("cpu.max") or read("cpu/cpu.cfs_quota_us") + read("cpu/cpu.cfs_period_us"), "pids": read("pids.max", "pids/pids.max"),
    "within": sorted(line.split(":")[2] for line in open("/proc/self/cgroup").read().splitlines()),
}))
"""


# An ordinary user's containers are always runc's.
ENGINES = [*([] if ROOTLESS else ["direct"]), *(["runc"] if shutil.which("runc") else [])]
CONTAINERS = ENGINES if "container" in RUNTIMES else []
pytestmark = pytest.mark.skipif(not HELD, reason="memory and processors cannot be limited here")


@pytest.fixture(scope="module", params=[*CONTAINERS, *(["gvisor"] if "gvisor" in RUNTIMES else [])])
def place(request: pytest.FixtureRequest, lab: Lab) -> Iterator[tuple[Lab, str]]:
    """A daemon and a runtime: gVisor, and a container by each engine that is here."""
    name = str(request.param)
    runtime = "gvisor" if name == "gvisor" else "container"
    if why := lab.works(runtime):
        pytest.skip(why)
    if name in ("gvisor", ENGINE):
        yield lab, runtime
        return
    made = Lab(NO_SPARES + f'[backend]\ncontainer_engine = "{name}"\n')
    yield made, runtime
    made.close()


@pytest.fixture
def container(place: tuple[Lab, str]) -> Lab:
    """The daemon of the containers; under gVisor's kernel a test with it is another one's."""
    if place[1] == "gvisor":
        pytest.skip("gVisor shows its own")
    return place[0]


@pytest.mark.parametrize(("memory", "cpus", "shown"), [(300, 1.0, 1), (640, 0.5, 1), (512, 2.0, 2)])
def test_everyday_22_programs_see_their_limits(place: tuple[Lab, str], memory: int, cpus: float, shown: int) -> None:
    lab, runtime = place
    with lab.sandbox(runtime=runtime, memory_mb=memory, cpus=cpus, pids=256) as made:
        found = json.loads(made.exec(["python3", "-c", PYTHON]).stdout)
        if runtime == "container":
            found["sysinfo"] = memory  # of that system call the machine's kernel knows one answer for all
        assert 0 < found.pop("available") <= memory
        assert found == {
            "meminfo": memory, "sysinfo": memory, "cpu_count": shown, "affinity": shown, "stat": shown, "cpuinfo": shown,
        }  # fmt: skip
        assert json.loads(made.run(PYTHON, language="python").stdout)["affinity"] == shown  # a warm interpreter
        assert made.exec("nproc").stdout == f"{shown}\n"
        assert made.exec("free -m").stdout.split("Mem:")[1].split()[0] == str(memory)
        total, count, heap = json.loads(made.exec(["node", "-e", NODE]).stdout)
        assert (total, count) == (memory, shown) and heap < memory, heap
        assert made.exec("echo x > /proc/meminfo").exit_code != 0


def test_everyday_22_java_sees_the_limits(place: tuple[Lab, str]) -> None:
    lab, runtime = place
    if runtime == "container" and ROOTLESS and Path("/sys/fs/cgroup/memory").exists():
        pytest.skip(
            "Java reads control groups of v1 only in the group that they are mounted at, and runc makes one below"
        )
    with lab.sandbox(runtime=runtime, memory_mb=512, cpus=1, pids=256) as made:
        if made.exec("command -v java").exit_code != 0:
            pytest.skip("the image has no Java")
        made.files.write("/workspace/L.java", JAVA)
        result = made.exec("java L.java", timeout=120)
        heap, processors = map(int, result.stdout.split())
        assert heap < 512 and processors == 1, result


def test_everyday_22_control_groups_tell_the_limits(container: Lab) -> None:
    """They are live, and the group that a program is in is the top of what it sees."""
    with container.sandbox(runtime="container", memory_mb=300, cpus=1.5, pids=100) as made:
        found = json.loads(made.exec(["python3", "-c", GROUPS]).stdout)
        assert found["memory"] == [str(300 << 20)] and 0 < int(found["used"][0]) < 300 << 20
        assert found["cpu"] == ["150000", "100000"] and 100 <= int(found["pids"][0]) < 120


def test_sandboxes_spread_over_the_processors(container: Lab) -> None:
    """Those with one processor are not all on the same one, and a program may ask for another."""
    code = "import os; print(*os.sched_getaffinity(0)); os.sched_setaffinity(0, {0}); print(*os.sched_getaffinity(0))"
    used = set()
    for _ in range(24):
        with container.sandbox(runtime="container", cpus=1) as made:
            first, second = made.exec(["python3", "-c", code]).stdout.split()
            assert second == "0"
            used.add(first)
        if len(used) > 1:
            return
    assert len(os.sched_getaffinity(0)) == 1, used
