"""`GET /v1/metrics`: figures of the daemon in Prometheus' text format. A metric is one row of the table below."""

import time
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple

import atoll
from atoll.accounts import KINDS
from atoll.server.request import Exchange
from atoll.server.routes import Rest, route

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

Labels = dict[str, str]
Sample = tuple[Labels, float]


class Metric(NamedTuple):
    """A row. `read` returns a sample for each set of labels; no label holds what a caller chose freely."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    read: Callable[[Rest], Iterable[Sample]]


def _read_sandboxes(rest: Rest) -> Iterable[Sample]:
    return [({"state": state}, count) for state, count in sorted(rest.core.store.count_by_state().items())]


def _read_calls(rest: Rest) -> Iterable[Sample]:
    counts = rest.core.auditing.counts
    return [({"verb": verb, "result": result}, count) for (verb, result), count in sorted(counts.items())]


def _read_held(rest: Rest) -> Iterable[Sample]:
    return [({"kind": kind}, rest.core.accounts.held(kind)) for kind in KINDS]


TABLE: Final = (
    Metric("atoll_info", "gauge", "The version of the daemon; always 1.", lambda _: [({"version": atoll.__version__}, 1)]),
    Metric("atoll_uptime_seconds", "gauge", "Seconds since the daemon started.",
           lambda rest: [({}, time.time() - rest.host.started_at)]),
    Metric("atoll_sandboxes", "gauge", "Sandboxes by state, without those that have ended.", _read_sandboxes),
    Metric("atoll_calls_total", "counter", "Writing verbs that have ended, by result, since the daemon started.", _read_calls),
    Metric("atoll_held", "gauge", "What all holders together hold, by kind of account; memory and disk in bytes.", _read_held),
)  # fmt: skip


def render(rest: Rest) -> str:
    """Return all metrics as text."""
    lines: list[str] = []
    for metric in TABLE:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{metric.name}{_format_labels(labels)} {value:.15g}" for labels, value in metric.read(rest)]
    return "\n".join(lines) + "\n"


def _format_labels(labels: Labels) -> str:
    inner = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@route("GET", "/v1/metrics", "Figures of the daemon in Prometheus' text format", scope="admin")
async def metrics(rest: Rest, exchange: Exchange) -> None:
    body = render(rest).encode()
    length = str(len(body)).encode()
    await exchange.start(200, [(b"content-type", CONTENT_TYPE), (b"content-length", length)])
    await exchange.end(body)
