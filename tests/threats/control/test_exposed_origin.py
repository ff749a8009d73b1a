"""CTL-10: sandboxes whose URLs differ only in their path share a browser's origin; none may take all of it over."""

import h11

from atoll.server import exposed


def test_no_answer_acts_on_the_whole_origin() -> None:
    """A worker for `/` would see every other sandbox's secret address. On an origin of its own a sandbox may have one."""
    sent = [("Service-Worker-Allowed", "/"), ("Clear-Site-Data", '"*"'), ("Content-Type", "text/javascript")]
    answer = h11.Response(status_code=200, headers=sent)
    shared = {name for name, _ in exposed._answer(answer, shared_origin=True, closes=False).headers}
    alone = {name for name, _ in exposed._answer(answer, shared_origin=False, closes=False).headers}
    assert shared == {b"content-type", b"referrer-policy"}
    assert alone == {b"service-worker-allowed", b"clear-site-data", b"content-type"}
