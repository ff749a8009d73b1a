"""FIL-05: traversal in disguise. Paths are decoded once; ids never become paths."""

import itertools
import os
from pathlib import Path

from lab.sandboxes import Lab

from atoll import Sandbox

DOTS = [
    "..",
    "%2e%2e",
    "%252e%252e",
    "%2E.",
    ".%2e",
    "%c0%ae%c0%ae",
    "%e0%80%ae%e0%80%ae",
    "%uff0e%uff0e",
    "%ef%bc%8e%ef%bc%8e",
    "..%00",
    "..;",
]
SLASHES = ["/", "%2f", "%252f", "%5c", "%c0%af", "//"]
ROUTES = [
    ("GET", "/v1/sandboxes/{id}/files?path={bad}"),
    ("GET", "/v1/sandboxes/{id}/tar?path={bad}"),
    ("GET", "/v1/sandboxes/{bad}"),
    ("GET", "/v1/sandboxes/{bad}/log"),
    ("GET", "/v1/sandboxes/{id}/commands/{bad}"),
    ("DELETE", "/v1/sandboxes/{bad}"),
    ("GET", "/v1/{bad}"),
    ("PUT", "/v1/sandboxes/{id}/files?path=/workspace/{bad}/x"),
]


def test_sixty_encodings_on_every_route(lab: Lab, anywhere: Sandbox) -> None:
    """No answer ever holds a file of the host, nothing on the host changes, and the daemon answers on."""
    secret = f"host-{os.urandom(8).hex()}"
    canary = Path("/tmp") / f"atoll-enc-{os.getpid()}"
    canary.write_text(secret)
    before = {p.name for p in Path(lab.home).iterdir()}
    try:
        for dots, slash in itertools.product(DOTS, SLASHES):
            bad = slash.join([dots] * 9) + slash + f"tmp{slash}{canary.name}"
            for method, route in ROUTES:
                status, answer = lab.ask(
                    method, route.format(id=anywhere.id, bad=bad), b"x" if method == "PUT" else None
                )
                assert status < 500 and secret not in repr(answer), (method, route, bad, status, answer)
        assert canary.read_text() == secret
        assert {p.name for p in Path(lab.home).iterdir()} == before
        assert anywhere.exec("true").ok
    finally:
        canary.unlink()


def test_decoded_exactly_once(lab: Lab, anywhere: Sandbox) -> None:
    """`%252e` is a name with a percent sign in it, not a dot."""
    status, _ = lab.ask("PUT", f"/v1/sandboxes/{anywhere.id}/files?path=/workspace/%252e%252e", b"literal")
    assert status == 200 and anywhere.files.read("/workspace/%2e%2e") == b"literal"
    anywhere.files.remove("/workspace/%2e%2e")
