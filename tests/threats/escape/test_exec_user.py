"""ESC-06: a user that two layers read differently (CVE-2026-30892, CVE-2026-46680)."""

import pytest

from atoll import Sandbox, errors

GOOD = {"0": (0, 0), "root": (0, 0), "0:0": (0, 0), "1": (1, None), "daemon": (1, 1), "65534": (65534, None), "1:1": (1, 1),
        "nobody": (65534, 65534), "1000:1001": (1000, 1001), "007": (7, None)}  # fmt: skip
BAD = ["-1", "+1", "0x0", "0x1", "1e3", "2147483648", "4294967295", "4294967296", "4294967297", "18446744073709551616", "65536",
       "65535:0", "0:65536", " 0", "0 ", "0\n", ":", "1:", ":1", "1:1:1", "no-such-user", "1:no-such-group", "root:", "０",
       "\u0661", "..", "root/..", "root\0"]  # fmt: skip


def ids(sandbox: Sandbox, user: str) -> tuple[int, int]:
    done = sandbox.exec(["cat", "/proc/self/status"], user=user)
    fields = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    uids, gids = set(fields["Uid"].split()), set(fields["Gid"].split())
    assert len(uids) == len(gids) == 1, fields
    return int(uids.pop()), int(gids.pop())


def test_what_is_accepted_is_what_runs(anywhere: Sandbox) -> None:
    """Real, effective, saved and file system ids are all the one meant."""
    for user, (uid, gid) in GOOD.items():
        found = ids(anywhere, user)
        assert found[0] == uid and gid in (None, found[1]), (user, found)


@pytest.mark.parametrize("user", BAD, ids=ascii)
def test_everything_else_is_refused(anywhere: Sandbox, user: str) -> None:
    """No odd text is ever rounded to a user, least of all to root."""
    with pytest.raises(errors.AtollError):
        anywhere.exec(["id"], user=user)


def test_an_entry_of_the_sandboxs_own_cannot_widen(anywhere: Sandbox) -> None:
    """/etc/passwd inside belongs to the attacker: ids out of range and names like numbers in it change nothing."""
    lines = (
        "trick:x:4294967296:0::/:/bin/sh\\nminus:x:-1:-1::/:/bin/sh\\n5:x:0:0::/:/bin/sh\\nbig:x:70000:0::/:/bin/sh\\n"
    )
    anywhere.exec(f"cp /etc/passwd /tmp/passwd; printf '{lines}' >> /etc/passwd")
    try:
        for user in ("trick", "minus", "big"):
            with pytest.raises(errors.AtollError):
                anywhere.exec(["id"], user=user)
        assert ids(anywhere, "5")[0] == 5
    finally:
        anywhere.exec("cat /tmp/passwd > /etc/passwd")
