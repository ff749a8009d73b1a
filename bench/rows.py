"""Every row of the benchmark: its question, its unit, how often it is asked, and the goal of each contender.

A family's function makes the contenders, the first of which is the baseline; what it does is told in its own file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from bench import (
    backtoback,
    command_line,
    create,
    doors,
    gateway,
    idle,
    images,
    live,
    network,
    oneshot,
    throughput,
    work,
    workspaces,
)
from bench.lab import Lab
from bench.measure import Contender, Goal

Make = Callable[[Lab], list[Contender]]
MBS, RARE, OFTEN = "MB/s", 1 / 6, 10.0


@dataclass(frozen=True)
class Plan:
    """One row. `rounds` is a multiple of what the command line asks for; `turns`: so many, without a round to warm up."""

    id: str
    title: str
    make: Make
    goals: Mapping[str, Goal] = field(default_factory=dict)  # by a contender's name
    unit: str = "ms"
    size: int = 0  # bytes of one round, for MB/s
    rounds: float = 1.0
    turns: int = 0
    runtime: str = ""  # needs this runtime
    note: str = ""

    def goal(self, contender: str) -> Goal | None:
        return self.goals.get(contender)


def ratio(value: float) -> Goal:
    return Goal("ratio", value)


def times(value: float) -> Goal:
    return Goal("times", value)


def most(value: float) -> Goal:
    return Goal("most", value)


def least(value: float) -> Goal:
    return Goal("least", value)


def _density(runtime: str, count: str) -> list[Plan]:
    ours = runtime == "container"
    return [
        Plan(
            f"density-{runtime}-{figure.replace('_', '-')}", f"{count} idle {runtime} sandboxes at once, {what}",
            partial(idle.density, runtime=runtime, figure=figure), goals if ours else {}, unit, turns=1, runtime=runtime,
        )
        for figure, what, unit, goals in (
            ("seconds", "to make them all", "s", {}),
            ("cpu_percent", "CPU of one core", "%", {"atoll": most(2)}),
            ("daemon_mb", "daemon memory for each", "MB", {}),
            ("sandbox_mb", "memory of each", "MB", {"atoll": most(3)}),
        )
    ]  # fmt: skip


def _goals(gvisor: Goal, container: Goal) -> dict[str, Goal]:
    return {"atoll gvisor": gvisor, "atoll container": container}


BACK_TO_BACK = [
    Plan(
        "row-python", "Python snippet, 200 back to back", partial(backtoback.snippets, language="python"),
        _goals(ratio(1.5), ratio(0.4)), turns=1,
    ),
    Plan("row-node", "Node snippet, 200 back to back", partial(backtoback.snippets, language="node"), turns=1),
    Plan("row-true", "exec of /bin/true, 200 back to back", backtoback.exec_true, _goals(ratio(5), ratio(1.4)), turns=1),
    Plan(
        "callers-python", "Python snippets of eight callers at once", backtoback.callers,
        _goals(times(0.7), times(2)), unit="per s", turns=3,
    ),
]  # fmt: skip
WORK = [
    *(
        Plan(
            name, task.title, partial(work.task, name=name),
            _goals(ratio(3), ratio(1.1)) if name.startswith("files-") else {}, rounds=RARE,
        )
        for name, task in work.TASKS.items()
    ),
    Plan("work-mean", "real work, geometric mean", work.mean, _goals(ratio(2), ratio(1.1)), turns=1),
]  # fmt: skip
ONE_SHOT = [
    Plan(f"oneshot-{name.lower()}", f"one-shot {what}", partial(oneshot.hello, language=name), rounds=1 / 2)
    for name, what in (
        ("sh", "hello, shell"),
        ("Python", "hello, Python"),
        ("Node", "hello, Node"),
        ("numpy", "import numpy, Python"),
    )
]
LIVE = [
    Plan("exec-true", "exec of /bin/true in a live sandbox", live.exec_true, {"atoll container": ratio(2)}, rounds=OFTEN),
    Plan("snippet-python", "Python snippet in a live sandbox", live.python, {"atoll container": ratio(0.5)}, rounds=3),
    Plan(
        "snippet-numpy", "import numpy in a live sandbox, imported ahead unless cold", live.numpy,
        {"atoll container": ratio(0.1)},
    ),
    Plan("snippet-node", "Node snippet in a live sandbox", live.node),
    Plan("snippet-shell", "shell snippet in a live sandbox", live.shell, rounds=3),
]  # fmt: skip
CREATE = [
    *(
        Plan(
            f"create-{runtime}", f"create and first command, {runtime}", partial(create.one, runtime=runtime),
            {"atoll cold": ratio(cold), "atoll pool, with destroy": ratio(0.3)},
            runtime=runtime,
        )
        for runtime, cold in (("container", 2.0), ("gvisor", 1.2))
    ),
    Plan("create-network", "what a network adds to a cold create", create.network, {"atoll with a network": Goal("extra", 5)}),
    Plan(
        "burst", "100 creates at once, each with a first command", partial(create.burst, count=100),
        {"atoll": ratio(1.0)}, turns=2, runtime="container",
    ),
    Plan(
        "sustained", "creates per second, sustained by four workers", partial(create.sustained, seconds=5.0),
        {"atoll": least(40)}, unit="per s", turns=2, runtime="container",
    ),
]  # fmt: skip
THROUGHPUT = [
    Plan("stdout", "stdout, 128 MiB", throughput.stdout, {"atoll container": least(300)}, MBS, throughput.BIG, RARE),
    Plan(
        "upload", "file upload, 128 MiB", throughput.upload, {"atoll container": least(300)}, MBS, throughput.BIG, RARE
    ),
    Plan(
        "download",
        "file download, 128 MiB",
        throughput.download,
        {"atoll container": least(300)},
        MBS,
        throughput.BIG,
        RARE,
    ),
]
COMMAND_LINE = [
    Plan(
        "cli-sandbox-run", "`atoll sandbox run`, Python hello", command_line.sandbox_run,
        {"atoll container": ratio(4)},
    ),
    Plan("cli-run", "`atoll run python3 -c 'print(1)'`", command_line.run_once, {"atoll container": ratio(6)}),
]  # fmt: skip
NETWORK = [
    Plan(
        "broker-first-byte", "first byte through the broker", partial(network.through, mode="first"),
        {"atoll container": Goal("extra", 1)}, rounds=RARE,
    ),
    Plan(
        "broker-throughput", "throughput through the broker, 256 MiB", partial(network.through, mode="bulk"),
        {"atoll container": least(200)}, MBS, 256 << 20, RARE,
    ),
    Plan("broker-many", "200 downloads of 1 MiB at once", partial(network.through, mode="many"), {}, MBS, 200 << 20, RARE),
    Plan("refused", "a host that is not allowed fails after", network.refused, {"atoll container": most(100), "atoll gvisor": most(100)}),
]  # fmt: skip
GATEWAY = [
    Plan(
        "grpc-exec", "gRPC exec of /bin/true", gateway.exec_true,
        {"atoll container, TLS": ratio(3), "atoll container, Unix socket": ratio(3)}, rounds=OFTEN,
    ),
    *(
        Plan(
            f"grpc-crowd-{figure}", f"64 gRPC clients at once, {what}",
            partial(gateway.crowd, figure=figure), goals, unit, turns=1, runtime="container",
        )
        for figure, what, unit, goals in (
            ("errors", "errors", "errors", {"atoll": most(0)}),
            ("rate", "calls per second", "per s", {}),
            ("p50", "time of one call", "ms", {}),
        )
    ),
]  # fmt: skip
WORKSPACES = [
    Plan(
        "snapshot", "snapshot of 1 GiB of random bytes", workspaces.rates,
        {"atoll save": least(300), "atoll restore": least(300)}, MBS, workspaces.GIB, turns=1,
    ),
    Plan("snapshot-again", "second snapshot, nothing changed", workspaces.again, {"atoll": ratio(0.2)}, turns=1),
]  # fmt: skip
DOORS = [
    Plan("mcp-call", "MCP sandbox_run on a live session", doors.mcp, {"atoll container": most(10)}, rounds=3),
    Plan("mcp-start", "MCP, from start to the first answer", doors.initialize, {"atoll": most(400)}, rounds=1 / 3),
    Plan("grep", "grep over 10,000 files", doors.grep, {"atoll": ratio(2)}, rounds=1 / 3),
    Plan(
        "image-pull",
        "image pull, 128 MiB, loopback registry with TLS",
        images.pull,
        {"atoll": least(125)},
        MBS,
        images.SIZE,
        RARE,
    ),
]
IDLE = [
    Plan(
        "memory-container", "memory of an idle sandbox (PSS and kernel), container", partial(idle.memory, runtime="container"),
        {"atoll": most(3), "atoll with a warm Python": most(7)}, "MB", turns=1, runtime="container",
    ),
    Plan(
        "memory-gvisor", "memory of an idle sandbox (PSS and kernel), gvisor", partial(idle.memory, runtime="gvisor"),
        {}, "MB", turns=1, runtime="gvisor",
    ),
    Plan(
        "idle-cpu-gvisor", "CPU of one core, one idle gvisor sandbox", idle.gvisor_cpu, {}, "%", turns=1, runtime="gvisor"
    ),
    *_density("container", "1,000"),
    Plan(
        "list-stopped", "list of 1,000 stopped sandboxes", idle.stopped, {"atoll": most(100)}, rounds=1 / 3,
        runtime="container",
    ),
    *_density("gvisor", "200"),
]  # fmt: skip

PLANS: list[Plan] = [
    *LIVE, *BACK_TO_BACK, *WORK, *CREATE, *ONE_SHOT, *COMMAND_LINE, *THROUGHPUT, *NETWORK, *GATEWAY, *WORKSPACES, *DOORS, *IDLE,
]  # fmt: skip
