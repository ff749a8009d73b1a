"""ESC-16: output and names that steer the operator's terminal."""

import re

from lab.sandboxes import Lab

from atoll import Sandbox

STEER = "\x1b]0;owned\x07\x1b[31m\x1b]8;;http://x\x1b\\\x9b2J\x08\r"
PLAIN = re.compile(rb"[^\x00-\x08\x0b-\x1f\x7f]*", re.DOTALL)


def safe(data: bytes) -> bool:
    return bool(PLAIN.fullmatch(data)) and "\x9b" not in data.decode("utf-8", "replace")


def test_listings_errors_and_logs_are_plain(lab: Lab, anywhere: Sandbox) -> None:
    """File names, command lines, output in JSON, transcripts and error texts: no control byte but newline and tab."""
    anywhere.files.write(f"/workspace/{STEER}", b"x")
    running = anywhere.start(["sh", "-c", f"printf '%s' '{STEER}'; exec sleep 653"])
    session = f"sess-{anywhere.id}"
    for words in (
        ("sandbox", "list", session, "/workspace"),
        ("sandbox", "ps", session),
        ("sandbox", "log", session),
        ("sandbox", "events", session),
        ("sandbox", "run", f"printf '%s' '{STEER}'; printf '%s' '{STEER}' >&2", "--session-id", session),
        ("sandbox", "read", session, f"/workspace/missing-{STEER}"),
        ("sandbox", "get", f"no{STEER}such"),
        ("exec", anywhere.id, "--cwd", f"/{STEER}", "--", "true"),
        ("sandbox", f"verb{STEER}"),
    ):
        done = lab.cli(*words)
        assert done.stdout + done.stderr != b"", words
        assert safe(done.stdout) and safe(done.stderr), (words, done)
    running.kill()


def test_raw_is_raw_when_asked(lab: Lab, anywhere: Sandbox) -> None:
    """Control: with `--raw` into a pipe the bytes are the command's own."""
    session = f"sess-{anywhere.id}"
    done = lab.cli("sandbox", "run", f"printf '%s' '{STEER}'", "--raw", "--session-id", session)
    assert done.stdout == STEER.encode()
