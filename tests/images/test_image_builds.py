"""`atoll image build` against a real daemon: steps in real sandboxes, the cache, what goes wrong, and what is left then."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.sandboxes import NO_SPARES, RUNTIMES, Lab
from lab.waiting import PATIENCE, until

CONFIG = NO_SPARES + "[images]\nbuild_memory_mb = 256\nbuild_disk_mb = 64\nbuild_context_mb = 16\n"
FILE = """FROM host AS one
ARG VERSION=1
RUN echo "version $VERSION" > /made && mkdir /gone && rm /etc/hosts && echo lib > /usr/share/made
ENV A=b C="d e"
FROM one
WORKDIR /srv/app
COPY . .
COPY --from=one --chown=1000:1000 --chmod=0640 /made /data/m
RUN <<END
echo "$A $C" > env
stat -c '%u:%g %a' /data/m > owner
rmdir /gone
END
COPY <<END /etc/greeting
hello $A
END
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root: an ordinary user's host image has one owner")
    made = Lab(CONFIG)
    yield made
    made.close()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/kept").write_text("kept\n")
    (tmp_path / "sub/left.log").write_text("left\n")
    (tmp_path / ".dockerignore").write_text("**/*.log\n")
    (tmp_path / "Dockerfile").write_text(FILE)
    return tmp_path


def build(lab: Lab, project: Path, *words: str, text: str | None = None) -> "subprocess.CompletedProcess[bytes]":
    more = () if text is None else ("-f", "-")
    return lab.cli("image", "build", *words, *more, str(project), stdin=(text or "").encode())


def is_clean(lab: Lab) -> bool:
    """Nothing of a build is left: no sandbox, no context, no upload."""
    builds = Path(lab.home) / "builds"
    left = [path for path in builds.iterdir() if path.name.startswith("work-")] + list((builds / "uploads").iterdir())
    return not left and not any((Path(lab.home) / "boxes").iterdir())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_build_makes_an_image_of_what_its_steps_did(lab: Lab, project: Path, runtime: str) -> None:
    done = build(lab, project, "-t", "app", "--runtime", runtime, "--build-arg", "VERSION=7", "--no-cache")
    assert done.returncode == 0, done.stderr
    script = "cat /made /usr/share/made /srv/app/env /srv/app/owner /etc/greeting; ls /srv/app/sub; ls -d /gone /etc/hosts; echo $C"
    ran = lab.cli("run", "--image", "app", "--backend", runtime, "sh", "-c", script)
    assert ran.stdout.decode().split("\n")[:-1] == [
        "version 7", "lib", "b d e", "1000:1000 640", "hello b", "kept", "d e",
    ], ran.stderr  # fmt: skip
    assert until(lambda: is_clean(lab))


def test_what_was_built_before_comes_from_the_cache_and_changes_are_seen(lab: Lab, project: Path) -> None:
    first = build(lab, project, text="FROM host\nCOPY sub /x\nRUN cat /proc/sys/kernel/random/uuid > /id\n")
    (project / "sub/left.log").write_text("ignored files do not count\n")
    os.utime(project / "sub/kept", (1, 1))
    again = build(lab, project, text="FROM host\nCOPY sub /x\nRUN cat /proc/sys/kernel/random/uuid > /id\n")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout == again.stdout  # by its content: the random number was not made again
    (project / "sub/kept").write_text("changed\n")
    other = build(lab, project, text="FROM host\nCOPY sub /x\nRUN cat /proc/sys/kernel/random/uuid > /id\n")
    assert other.returncode == 0 and other.stdout != first.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM host\nRUN echo why; exit 3\n", "line 2: the step ended with 3\nwhy"),
        ("FROM host\n\nADD ../.. /x\n", "line 3: ADD takes '../..' from outside the context"),
        ("FROM host\nCOPY out /x\n", "line 2: COPY cannot be done: 'out' is a link that leads out"),
        ("FROM host\nCOPY nothing /x\n", "line 2: COPY cannot be done: 'nothing' is not there"),
        ("FROM host\nCOPY sub/kept /proc/x\n", "an image cannot hold /proc"),
        ("FROM host\nADD https://example.org/x /x\n", "from the network"),
        ("FROM host\nCOPY --chown=nobody-here sub /x\n", "no user 'nobody-here'"),
        ("FROM host\nONBUILD RUN x\n", "line 2: ONBUILD is not supported"),
        ("FROM host\nUSER no-such-user\nRUN true\n", "line 3:"),
        ("FROM host\nRUN dd if=/dev/zero of=/big bs=1M count=200\n", "No space left on device"),
        ("FROM scratch\nRUN true\n", "line 2: RUN has no program to run"),
    ],
)
def test_what_goes_wrong_is_told_with_its_line_and_leaves_nothing(
    lab: Lab, project: Path, text: str, said: str
) -> None:
    (project / "out").symlink_to("/etc/shadow")
    done = build(lab, project, text=text)
    assert done.returncode != 0 and said in done.stderr.decode(), done.stderr
    assert until(lambda: is_clean(lab))


def test_a_step_reaches_no_host_that_is_not_listed(lab: Lab, project: Path) -> None:
    script = "import socket\ntry: socket.create_connection(('example.org', 80), 20)\nexcept OSError as e: print('refused', e)\n"
    done = build(lab, project, "--no-cache", text=f'FROM host\nRUN <<"END"\npython3 -c "{script}" && false\nEND\n')
    assert b"refused" in done.stderr


def test_a_builder_that_goes_away_takes_its_step_along(lab: Lab, project: Path) -> None:
    command = [sys.executable, "-m", "atoll", "image", "build", "-f", "-", str(project)]
    process = subprocess.Popen(command, env=lab.env, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(b"FROM host\nRUN echo begun; sleep 1000\n")
    process.stdin.close()
    assert until(lambda: any((Path(lab.home) / "boxes").iterdir()))
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    process.stderr.close()
    assert until(lambda: is_clean(lab))


def test_files_larger_than_the_limit_are_refused(lab: Lab, project: Path) -> None:
    with open(project / "large", "wb") as file:
        file.truncate(17 << 20)
    done = build(lab, project, text="FROM host\nCOPY . /x\n")
    assert done.returncode != 0 and b"at most 16 MB" in done.stderr
    assert until(lambda: is_clean(lab))


def test_pruning_keeps_what_is_named_and_removes_the_rest(lab: Lab, project: Path) -> None:
    assert build(lab, project, "-t", "kept", text="FROM host\nRUN echo kept > /k\n").returncode == 0
    assert build(lab, project, text="FROM host\nRUN echo lost > /k\n").returncode == 0
    assert lab.cli("image", "prune").returncode == 0
    ran = lab.cli("run", "--image", "kept", "cat", "/k")
    assert ran.stdout == b"kept\n", ran.stderr
    again = build(lab, project, text="FROM host\nRUN echo lost > /k\n")
    assert again.returncode == 0, again.stderr
