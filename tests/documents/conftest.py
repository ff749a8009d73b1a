"""A person's shell for the documents' commands: an empty home, and the program on PATH under each of its names."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.sandboxes import NO_SPARES, PATIENCE, PYTHON_PATHS, SOURCE

ROOT = Path(__file__).parents[2]
NAMES = ("atoll", "k8e", "k8e-sandbox", "agentkernel")
PROGRAM = """#!/bin/sh
exec {python} -c 'import sys; sys.argv[0] = "{program}"; from atoll.cli import main; sys.exit(main())' "$@"
"""


class Shell:
    """Runs what is typed, in a home and a directory of its own. The daemon is started by the first command that needs it."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="atd-"))
        self.home, self.project, programs = (self.root / name for name in ("home", "project", "bin"))
        for directory in (self.home / ".atoll", self.project, programs):
            directory.mkdir(parents=True)
        (self.home / ".atoll" / "config.toml").write_text(NO_SPARES)
        for name in NAMES:
            program = programs / name
            program.write_text(PROGRAM.format(python=sys.executable, program=program))
            program.chmod(0o755)
        python = programs / "python3"  # the documents' own scripts import the SDK
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "K8E_", "AGENTKERNEL_", "III_", "XDG_"))
        }
        self.env = {
            **kept,
            "HOME": str(self.home),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([SOURCE, str(ROOT / "sdk" / "python"), *PYTHON_PATHS]),
            "ATOLL_RUNTIME": "container",  # tests/behaviour has every runtime
        }

    def __call__(self, script: str, **env: str) -> str:
        """Everything the script prints, and how it ended as the last line."""
        done = subprocess.run(
            ["bash", "-uo", "pipefail", "-c", script], cwd=self.project, env={**self.env, **env}, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=4 * PATIENCE,
        )  # fmt: skip
        assert "Traceback" not in done.stdout, done.stdout
        return f"{done.stdout}[exit {done.returncode}]"

    def close(self) -> None:
        said = self("atoll daemon stop --force || atoll daemon status")
        assert "stopped" in said or "not running" in said, said
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = Shell()
    try:
        yield made
    finally:
        made.close()


Check = Callable[[str, tuple[str, ...]], None]


@pytest.fixture(scope="module")
def typed(shell: Shell) -> Check:
    """Type a script and find these texts in what it prints, one after another."""

    def check(script: str, wanted: tuple[str, ...]) -> None:
        printed = shell(script)
        at = 0
        for text in wanted:
            found = printed.find(text, at)
            assert found >= 0, f"{text!r} is missing after {at}:\n$ {script}\n{printed}"
            at = found + len(text)
        if "[exit " not in "".join(wanted):
            assert printed.endswith("[exit 0]"), f"$ {script}\n{printed}"

    return check
