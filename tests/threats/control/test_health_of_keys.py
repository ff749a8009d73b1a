"""F2-L4: a key learns neither how many sandboxes others have nor where the daemon keeps its state."""

from lab.keys import holder, keyed_daemon

from atoll.client import calls
from atoll.client._sync.driver import Link


def test_health_tells_a_key_that_the_daemon_is_well_and_no_more() -> None:
    with keyed_daemon() as daemon, holder(daemon, "tenant") as tenant, holder(daemon, "operator", "admin") as operator:
        told = tenant.call(calls.get("/v1/health"))
        assert set(told) == {"ok", "version"}
        mine = Link(path=str(daemon.home / "daemon.sock"))
        for seen in (operator.call(calls.get("/v1/health")), mine.call(calls.get("/v1/health"))):
            assert seen["home"] == str(daemon.home) and seen["sandboxes"] == 0 and "pool" in seen
