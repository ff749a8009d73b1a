"""FIL-07: files that are none: a FIFO, /dev/zero, a tty, a huge sparse file, endless pseudo-files."""

from atoll import Sandbox, errors


def test_each_gives_an_error_or_bounded_data(anywhere: Sandbox) -> None:
    """No call hangs, none returns without end, and the agent answers afterwards."""
    anywhere.exec(
        "mkfifo /workspace/pipe; truncate -s 20M /workspace/sparse; ln -sf /dev/zero /workspace/zero; mkdir -p /workspace/dir"
    )
    for path in (
        "/workspace/pipe",
        "/dev/zero",
        "/workspace/zero",
        "/dev/tty",
        "/dev/urandom",
        "/dev/ptmx",
        "/dev/stdin",
        "/proc/kmsg",
        "/workspace/dir",
    ):
        for act in (anywhere.files.read, lambda place: anywhere.files.grep("x", place)):
            try:
                answer = act(path)
            except errors.AtollError:
                continue
            assert len(answer) <= 1 << 20, path
        assert anywhere.exec("true").ok
    assert sum(len(piece) for piece in anywhere.files.read_stream("/workspace/sparse")) == 20 << 20
    anywhere.exec("rm -rf /workspace/pipe /workspace/sparse /workspace/zero /workspace/dir")


def test_a_write_to_one_does_not_hang(anywhere: Sandbox) -> None:
    """A FIFO nobody reads and a device: replaced or refused, never waited for."""
    anywhere.exec("mkfifo /workspace/pipe2")
    for path in ("/workspace/pipe2", "/dev/full", "/dev/null"):
        for options in ({}, {"append": True}):
            try:
                anywhere.files.write(path, b"x", **options)
            except errors.AtollError:
                pass
    assert anywhere.exec("rm -f /workspace/pipe2; echo on").stdout == "on\n"
