"""Out of memory ends the program that takes too much, not the sandbox: exit code 137, the reason in the result, stderr and events.

Each shape takes memory in another way; the sandbox and its files are there afterwards, and other programs of it go on.
"""

import pytest
from lab.sandboxes import HELD, ROOTLESS, Lab, until

from atoll import errors

pytestmark = pytest.mark.skipif(not HELD, reason="memory cannot be limited here")

MEMORY = 256
MANY = """
for i in $(seq 8); do python3 -c 'import time; x = bytearray(90 << 20); time.sleep(5)' & pids="$pids $!"; done
code=0; for p in $pids; do wait $p || code=$?; done; exit $code
"""
COPIES = """
import os, time
x = bytearray(80 << 20)
for _ in range(6):
    if os.fork() == 0:
        for at in range(0, len(x), 4096): x[at] = 1
        time.sleep(5)
        os._exit(0)
failed = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6)]
os._exit(137 if -9 in failed else 0)
"""
SHM = "dd if=/dev/zero of=/dev/shm/x bs=1M count=300 2>/dev/null; python3 -c 'x = bytearray(240 << 20)'; exit $?"
SHAPES: dict[str, list[str]] = {
    "in one go": ["python3", "-c", "x = bytearray(700 * 1024 * 1024); print('got it')"],
    "in small pieces": ["python3", "-c", "x = []\nwhile True: x.append(bytearray(4096))"],
    "many programs": ["bash", "-c", MANY],
    "copies on write": ["python3", "-c", COPIES],
    "a file in memory": [
        "python3",
        "-c",
        "import os\nf = os.memfd_create('x')\nwhile True: os.write(f, b'x' * (1 << 20))",
    ],
    "beside shared memory": ["bash", "-c", SHM],
    "below a shell": ["bash", "-c", "python3 -c 'x = bytearray(700 << 20)' & wait $!"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_everyday_1_the_program_alone_is_killed(lab: Lab, runtime: str, shape: str) -> None:
    with lab.sandbox(runtime=runtime, memory_mb=MEMORY) as made:
        made.files.write("/workspace/kept", "mine")
        other = made.start("sleep 600")
        result = made.exec(SHAPES[shape], timeout=90)
        assert (result.exit_code, result.oom) == (137, True), result
        assert "out of memory" in result.stderr and "got it" not in result.stdout
        assert made.exec("rm -f /dev/shm/x; cat /workspace/kept").stdout == "mine"
        if shape in ("in one go", "in small pieces"):  # others may take more than one program to end
            assert other.poll().status == "running"
        kinds = [event["kind"] for event in made.events()]
        assert "oom" in kinds, kinds


def test_everyday_1_a_neighbour_notices_nothing(lab: Lab, runtime: str) -> None:
    with lab.sandbox(runtime=runtime, memory_mb=MEMORY) as hog, lab.sandbox(runtime=runtime) as neighbour:
        assert hog.exec(SHAPES["in one go"]).oom
        assert neighbour.exec("echo fine").stdout == "fine\n"


def test_everyday_1_what_fits_is_left_alone(lab: Lab, runtime: str) -> None:
    """Most of the limit can be used, and pages of files are not counted as a program's memory."""
    disk = {} if ROOTLESS else {"disk_mb": 1024}  # an ordinary user's disk of a given size is in memory
    with lab.sandbox(runtime=runtime, memory_mb=MEMORY, **disk) as made:
        result = made.exec(["python3", "-c", f"x = bytearray({MEMORY * 3 // 4} << 20); print(len(x))"])
        assert result.exit_code == 0 and not result.oom, result
        result = made.exec("dd if=/dev/zero of=/workspace/big bs=1M count=600 2>/dev/null; cat /workspace/big | wc -c")
        assert result.stdout.strip() == str(600 << 20) and not result.oom, result


def test_everyday_1_a_sandbox_that_is_lost_all_the_same_keeps_its_disk(lab: Lab) -> None:
    """gVisor cannot cut a system call short. One that fills far more than the limit may cost the sandbox, and `start` brings it back."""
    if why := lab.works("gvisor"):
        pytest.skip(why)
    with lab.sandbox(runtime="gvisor", memory_mb=128) as made:
        made.files.write("/workspace/kept", "mine")
        try:
            result = made.exec(["python3", "-c", "open('/dev/zero', 'rb').read(1900 << 20)"], timeout=90)
        except errors.SandboxGone as gone:
            assert gone.details["reason"] == "oom"
            until(lambda: made.info().state == "stopped", "it is stopped, and not ended")
            made.restart()
        else:
            assert result.oom
        assert made.files.read_text("/workspace/kept") == "mine"
