"""FIL-04: names of any bytes make the round trip or are refused, and never break an answer."""

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.sandboxes import LONG

from atoll import Sandbox, errors

# What a directory entry may be, and what it may not.
PIECES = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([b"\xff\xfe", b"\xed\xa0\x80", b"a" * 255, b"a" * 256, b"\n", b"%00", b"\\"]),
)


@settings(
    max_examples=600 if LONG else 60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)
@given(name=PIECES, content=st.binary(max_size=20))
def test_any_bytes_round_trip_or_are_refused(anywhere: Sandbox, name: bytes, content: bytes) -> None:
    """Write, list, read, remove by the same bytes."""
    path = b"/workspace/odd/" + name
    legal = b"\0" not in name and len(os.path.basename(path)) <= 255 and b"/" not in name and name not in (b".", b"..")
    try:
        anywhere.files.write(path, content)
    except errors.AtollError as error:
        assert error.http_status == 400 or not legal, error
        assert not legal, (name, error)
        return
    except ValueError:
        assert not legal, name
        return
    assert anywhere.files.read(path) == content
    if legal:
        listed = [entry.wire for entry in anywhere.files.list("/workspace/odd")]
        assert len(listed) == 1, listed
        assert anywhere.files.remove(path) == 1
    else:
        anywhere.files.remove(b"/workspace/odd", recursive=True, missing_ok=True)


def test_too_long_and_nul_are_clean_errors(anywhere: Sandbox) -> None:
    """Refused before use, as the caller's mistake."""
    for path in ("/workspace/a\0b", "/workspace/" + "x" * 5000, "/workspace/" + "y" * 256):
        for act in (
            anywhere.files.read,
            anywhere.files.stat,
            anywhere.files.list,
            anywhere.files.mkdir,
            anywhere.files.remove,
        ):
            try:
                act(path)
            except errors.AtollError as error:
                assert error.http_status in (400, 404), (act, error)
            except ValueError:
                pass
            else:
                raise AssertionError(f"{act} took {path[:40]!r}")
    assert anywhere.exec("true").ok
