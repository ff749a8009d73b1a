"""RES-11: what a chatty sandbox leaves on the host is bounded: transcripts, kept output, events."""

from pathlib import Path

from lab.sandboxes import Lab, until

CAP = 24 << 20  # transcript 8 MiB, kept output 10 MiB of one background run, and room for the store
FLOOD = f"yes {'x' * 99} | head -c "


def size(tree: Path) -> int:
    return sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())


def test_the_state_directory_stays_below_its_cap(lab: Lab, runtime: str) -> None:
    """More output than the cap, in the foreground and the background; then hundreds of events."""
    with lab.sandbox(runtime=runtime) as made:
        places = [Path(lab.home) / name for name in ("transcripts", "runs")]
        before = sum(size(place) for place in places)
        size_each = "60000000" if runtime == "container" else "16000000"
        made.exec(FLOOD + size_each, timeout=None)
        made.start(FLOOD + size_each).wait()
        for _ in range(100):
            made.exec("true")
        until(lambda: made.exec("true").ok, "it answers")
        assert sum(size(place) for place in places) - before < CAP
        ident = made.id
    until(lambda: not list(Path(lab.home).glob(f"runs/{ident}*")), "kept output goes with the sandbox")
