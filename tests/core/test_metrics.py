"""The daemon's metrics as a scraper sees them."""

import re

from lab.daemon import DaemonProcess

LINE = re.compile(r'^(?P<name>[a-z_]+)(\{(?P<labels>[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*)\})? (?P<value>[0-9.e+-]+)$')


def scrape(daemon: DaemonProcess) -> dict[str, float]:
    """Return each sample by its name and labels; every line must be of Prometheus' text format."""
    found = {}
    response, body = daemon.raw("GET", "/v1/metrics")
    assert response.status == 200 and response.getheader("Content-Type").startswith("text/plain; version=0.0.4")
    for line in body.decode().splitlines():
        if line.startswith("# "):
            assert re.match(r"^# (HELP|TYPE) atoll_[a-z_]+ .+$", line)
            continue
        matched = LINE.match(line)
        assert matched, line
        found[line.rpartition(" ")[0]] = float(matched["value"])
    return found


def test_metrics_count_sandboxes_calls_and_what_is_held(own_daemon: DaemonProcess) -> None:
    before = scrape(own_daemon)
    assert not any(name.startswith("atoll_sandboxes") for name in before)
    box = own_daemon.create()
    box.exec("true")
    during = scrape(own_daemon)
    assert during['atoll_sandboxes{state="running"}'] == 1
    assert during['atoll_calls_total{verb="create",result="ok"}'] == 1
    assert during['atoll_calls_total{verb="commands.exec",result="ok"}'] == 1
    assert during['atoll_held{kind="disk"}'] > 0
    box.destroy()
    after = scrape(own_daemon)
    assert after['atoll_calls_total{verb="destroy",result="ok"}'] == 1
    assert after['atoll_held{kind="disk"}'] == 0 and 'atoll_sandboxes{state="running"}' not in after
    assert after["atoll_uptime_seconds"] > 0


def test_a_failed_call_is_counted_by_its_error_code(own_daemon: DaemonProcess) -> None:
    own_daemon.raw("DELETE", "/v1/sandboxes/nope")
    assert scrape(own_daemon)['atoll_calls_total{verb="destroy",result="not_found"}'] == 1
