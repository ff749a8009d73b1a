"""Real work: what an agent lets run in /workspace, on the bare host, in containers of the plain engines, and in sandboxes.

A *place* runs a shell script where /workspace, or what stands for it, is the working directory. Each place gets the same files from one
tar, then every task takes turns between the places. A task prepares itself untimed, so that each round finds the same.
"""

import io
import math
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll import Sandbox
from bench import rootfs
from bench.lab import Lab
from bench.measure import Contender, absent, middle
from bench.programs import PYTHON, Unavailable, find

FEW, MANY, WHEELS, SOURCES = 2000, 10_000, 20, 12
ENV = {"HOME": "/tmp", "PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
Place = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """A script, what is done before it, and the program it cannot do without."""

    title: str
    script: str
    before: str = ""
    needs: str = "bash"
    module: str = ""  # of the machine's Python


TASKS = {
    "files-grep": Task(f"grep -r over {FEW:,} files", "grep -r needle-7 few > /dev/null"),
    "files-git-add": Task(
        f"git add of {FEW:,} files", "git -C few add -A",
        "rm -rf few/.git && git init -q few && git -C few config gc.auto 0", "git",
    ),
    "files-git-status": Task(
        f"git status of {FEW:,} files", "git -C few status --short > /dev/null",
        "[ -e few/.git/index ] || { git init -q few && git -C few add -A; }", "git",
    ),
    "files-tar": Task(f"tar of {FEW:,} files", "tar -cf - few | cat > /dev/null"),
    "work-clone": Task(
        "git clone of a local repository", "git clone -q --no-hardlinks origin clone", "rm -rf clone", "git"
    ),
    "work-pip": Task(
        f"pip install of {WHEELS} local wheels",
        f"{PYTHON} -m pip install -q --no-index --no-deps --no-compile --disable-pip-version-check --root-user-action=ignore "
        "--target site wheels/*.whl",
        "rm -rf site", module="pip",
    ),
    "work-tests": Task("python3 -m unittest of a small project", f"cd project && {PYTHON} -m unittest -q 2> /dev/null"),
    "work-c": Task("make of a small C program", "make -s -j2 -C c", "make -s -C c clean", "gcc"),
    "work-search": Task(
        f"grep and sed over {MANY:,} files",
        "grep -rl needle-7 many | xargs sed -i s/needle/noodle/ && grep -rl noodle-7 many | xargs sed -i s/noodle/needle/",
    ),
    "work-pandas": Task(
        "pandas, a million rows",
        f"{PYTHON} -c \"import numpy, pandas; f = pandas.DataFrame({{'k': numpy.arange(10**6) % 97, 'v': 1.5}}); "
        "print(f.groupby('k').v.sum().sum())\" > /dev/null",
        module="pandas",
    ),
}  # fmt: skip
GROUP = [name for name in TASKS if name.startswith("work-")]


def task(lab: Lab, name: str) -> list[Contender]:
    """One task in every place. The figures are kept for the group's mean."""
    one = TASKS[name]
    find(one.needs)
    if one.module and subprocess.run([PYTHON, "-c", f"import {one.module}"], capture_output=True).returncode != 0:
        raise Unavailable(f"{PYTHON} has no {one.module}")
    found = []
    for where, place in _places(lab).items():
        if isinstance(place, str):
            found.append(absent(where, place))
        else:
            found.append(Contender(where, partial(place, one.script), partial(place, one.before or ":")))
    if name in GROUP:
        _measured(lab)[name] = found
    return found


def mean(lab: Lab) -> list[Contender]:
    """The geometric mean of the group's medians, of the tasks that ran on the bare host. One that failed elsewhere leaves no mean."""
    tasks = [{c.name: c for c in row} for row in _measured(lab).values()]
    names = [name for name in (tasks[0] if tasks else {}) if all(one[name].work for one in tasks)]
    ran = [one for one in tasks if one[names[0]].figures] if names else []
    if not ran:
        raise Unavailable(f"none of its tasks was measured in this run: {', '.join(GROUP)}")
    return [Contender(name, partial(_mean, [one[name].figures for one in ran])) for name in names]


def _mean(figures: list[list[float]]) -> float:
    return math.exp(sum(math.log(middle(one) / 1000) for one in figures) / len(figures))


def _measured(lab: Lab) -> dict[str, list[Contender]]:
    return lab.once("work, measured", dict)


# Places


def _places(lab: Lab) -> dict[str, Place | str]:
    """By name: how a script is run there, or why it cannot be."""
    return lab.once("work, places", lambda: _make_places(lab))


def _make_places(lab: Lab) -> dict[str, Place | str]:
    archive = _archive(lab.work / "work.tar")
    made: dict[str, Callable[[], Place]] = {"bare": lambda: _bare(lab, archive)}
    made |= {f"atoll {r}": partial(_atoll, lab, r, archive) for r in lab.default_first()}
    made |= {"runsc run": partial(_engine, lab, "runsc", archive), "runc run": partial(_engine, lab, "runc", archive)}
    found: dict[str, Place | str] = {}
    for name, make in made.items():
        try:
            found[name] = make()
        except (Unavailable, RuntimeError, OSError, subprocess.SubprocessError) as error:
            found[name] = str(error)[:160]
    return found


def _bare(lab: Lab, archive: Path) -> Place:
    place = _unpacked(lab.work / "work-bare", archive)
    return lambda script: _checked(["/bin/bash", "-ec", script], cwd=place, env=ENV)


def _engine(lab: Lab, engine: str, archive: Path) -> Place:
    """A container for each script, with the directory as its /workspace: how one would use the engine by hand."""
    place = _unpacked(lab.work / f"work-{engine}", archive)
    options = ["--network=none", "--ignore-cgroups", "--platform=systrap"] if engine == "runsc" else []
    program, count = [find(engine), *options], iter(range(1_000_000_000))
    bundles: dict[str, Path] = {}

    def run(script: str) -> None:
        if script not in bundles:
            bundles[script] = rootfs.bundle(lab, ["/bin/bash", "-ec", script], workspace=place, env=ENV)
        _checked([*program, "run", "--bundle", str(bundles[script]), f"{lab.work.name}-{engine}-{next(count)}"])

    run("true")
    return run


def _atoll(lab: Lab, runtime: str, archive: Path) -> Place:
    box = Sandbox.create(home=lab.home, runtime=runtime, network=False, cpus=2, memory_mb=4096, disk_mb=4096)
    lab.at_end(box.close)  # the daemon's end destroys it
    box.files.write("/workspace/work.tar", archive.read_bytes())

    def run(script: str) -> None:
        done = box.exec(["/bin/bash", "-ec", script], cwd="/workspace", env=ENV, timeout=300)
        if done.exit_code != 0:
            raise RuntimeError(f"exit {done.exit_code}: {done.stderr[-200:]}")

    run("tar -xf work.tar && rm work.tar")
    return run


def _checked(argv: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.decode(errors='replace')[-200:]}")


# The files


def _unpacked(place: Path, archive: Path) -> Path:
    place.mkdir()
    subprocess.run(["tar", "-C", str(place), "-xf", str(archive), "--no-same-owner"], check=True)
    return place


def _archive(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in _files().items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
        if repository := _repository(path.parent / "work-origin"):
            tar.add(repository, "origin")
    return path


def _files() -> dict[str, bytes]:
    found = {}
    for tree, count in (("few", FEW), ("many", MANY)):
        for number in range(count):
            text = f"file {number}\nneedle-{number % 100}\n" + "some words of a file like any other\n" * 25
            found[f"{tree}/d{number % 50}/f{number}.txt"] = text.encode()
    for number in range(WHEELS):
        found[f"wheels/bench_wheel_{number}-1.0-py3-none-any.whl"] = _wheel(f"bench_wheel_{number}")
    for number in range(SOURCES):
        body = "\n".join(f"int f{number}_{n}(int x) {{ return x * {n} + {number}; }}" for n in range(200))
        found[f"c/s{number}.c"] = f"#include <stdio.h>\n#include <stdlib.h>\n{body}\n".encode()
    objects = " ".join(f"s{number}.o" for number in range(SOURCES))
    found["c/main.c"] = b"int f0_1(int);\nint main(void) { return f0_1(0); }\n"
    found["c/Makefile"] = (
        f"prog: main.o {objects}\n\tgcc -o $@ $^\n%.o: %.c\n\tgcc -O1 -c -o $@ $<\nclean:\n\trm -f *.o prog\n"
    ).encode()
    for number in range(20):
        cases = "\n".join(f"    def test_{n}(self): self.assertEqual(double({n}), {2 * n})" for n in range(20))
        text = (
            f"import unittest\nfrom code_under_test import double\n\nclass Case{number}(unittest.TestCase):\n{cases}\n"
        )
        found[f"project/test_{number}.py"] = text.encode()
    found["project/code_under_test.py"] = b"import dataclasses, json, re\n\ndef double(x): return 2 * x\n"
    return found


def _wheel(name: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        files = {f"{name}/m{n}.py": f"VALUE = {n}\n" * 50 for n in range(25)}
        files[f"{name}/__init__.py"] = ""
        about = f"{name}-1.0.dist-info"
        files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        record = [*files, f"{about}/RECORD"]
        files[f"{about}/RECORD"] = "".join(f"{file},,\n" for file in record)
        for file, text in files.items():
            wheel.writestr(file, text)
    return made.getvalue()


def _repository(place: Path) -> Path | None:
    """A bare repository of 1,000 files and 20 commits; None without git."""
    try:
        git = find("git")
    except Unavailable:
        return None
    work = place.with_name("work-tree")
    who = ["-c", "user.name=bench", "-c", "user.email=bench@example.org"]
    subprocess.run([git, "init", "-q", str(work)], check=True, env=ENV)
    for commit in range(20):
        for number in range(50):
            file = work / f"d{number}" / f"f{commit}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"{commit} {number}\n" * 60)
        subprocess.run([git, "-C", str(work), "add", "-A"], check=True, env=ENV)
        subprocess.run([git, "-C", str(work), *who, "commit", "-q", "-m", str(commit)], check=True, env=ENV)
    subprocess.run([git, "clone", "-q", "--bare", str(work), str(place)], check=True, env=ENV)
    return place
