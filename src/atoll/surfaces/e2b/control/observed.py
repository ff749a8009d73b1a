"""Routes for metrics and logs of sandboxes."""

from collections.abc import Mapping

from atoll import errors
from atoll.model import Metric
from atoll.server.request import Exchange, whole
from atoll.surfaces.e2b import words
from atoll.surfaces.e2b.control.table import known, route
from atoll.surfaces.e2b.replies import query_of
from atoll.surfaces.e2b.served import Served

MOST_LOGS = 1000
MOST_AT_ONCE = 100


def shown(metric: Metric) -> Mapping[str, object]:
    return {
        "timestamp": words.moment(metric.at),
        "timestampUnix": int(metric.at),
        "cpuCount": metric.cpus,
        "cpuUsedPct": metric.cpu_percent,
        "memUsed": metric.memory_bytes,
        "memTotal": metric.memory_total_bytes,
        "memCache": 0,
        "diskUsed": metric.disk_bytes,
        "diskTotal": metric.disk_total_bytes,
    }


@route("GET", "sandboxes/*/metrics")
async def metrics(app: Served, exchange: Exchange) -> None:
    query = query_of(exchange)
    start, end = whole(query, "start"), whole(query, "end")
    info = await known(app, exchange)
    last = None if end is None else end + 1
    found = await app.core.metrics.get(exchange.who, info.id, start, last)
    await exchange.answer([shown(one) for one in found])


@route("GET", "sandboxes/metrics")
async def metrics_of_many(app: Served, exchange: Exchange) -> None:
    names = [name for name in query_of(exchange).get("sandbox_ids", "").split(",") if name]
    if not 0 < len(names) <= MOST_AT_ONCE:
        raise errors.InvalidArgument(f"sandbox_ids names 1 to {MOST_AT_ONCE} sandboxes")
    found = {}
    for info in await app.core.sandboxes.list(exchange.who):
        if info.id in names and words.TEMPLATE in info.labels:
            samples = await app.core.metrics.get(exchange.who, info.id)
            if samples:
                found[info.id] = shown(samples[-1])
    await exchange.answer({"sandboxes": found})


@route("GET", "sandboxes/*/logs")
async def logs(app: Served, exchange: Exchange) -> None:
    query = query_of(exchange)
    start, limit = whole(query, "start", 0), whole(query, "limit", MOST_LOGS, 0, MOST_LOGS)
    entries = [one for one in await _entries(app, exchange) if one[0] * 1000 >= start][:limit]
    told = [{"timestamp": words.moment(at), "line": text} for at, text, _ in entries]
    await exchange.answer({"logs": told, "logEntries": [_entry(*one) for one in entries]})


@route("GET", "v2/sandboxes/*/logs")
async def logs_of_now(app: Served, exchange: Exchange) -> None:
    query = query_of(exchange)
    cursor, limit = whole(query, "cursor"), whole(query, "limit", MOST_LOGS, 0, MOST_LOGS)
    backward = query.get("direction") == "backward"
    if query.get("direction") not in (None, "", "forward", "backward"):
        raise errors.InvalidArgument("direction is forward or backward")
    found = await _entries(app, exchange)
    if cursor is not None:
        found = [one for one in found if (one[0] * 1000 <= cursor if backward else one[0] * 1000 >= cursor)]
    if search := query.get("search"):
        found = [one for one in found if search in one[1]]
    if query.get("level") in ("warn", "error"):
        found = []
    found = found[::-1][:limit] if backward else found[:limit]
    await exchange.answer({"logs": [_entry(*one) for one in found]})


async def _entries(app: Served, exchange: Exchange) -> list[tuple[float, str, Mapping[str, object]]]:
    """Return the sandbox's events, the oldest first: when, a line, and its fields."""
    info = await known(app, exchange)
    found: list[tuple[float, str, Mapping[str, object]]] = []
    for event in app.core.history.events(exchange.who.owner, info.id, MOST_LOGS, None):
        fields = {key: value for key, value in event.items() if key not in ("seq", "sandbox_id", "at", "kind")}
        line = " ".join([event["kind"], *(f"{key}={value}" for key, value in fields.items())])
        found.append((float(event["at"]), line[:4096], {"kind": event["kind"]} | fields))
    return found


def _entry(at: float, line: str, fields: Mapping[str, object]) -> Mapping[str, object]:
    texts = {key: str(value)[:1024] for key, value in fields.items()}
    return {"timestamp": words.moment(at), "message": line, "level": "info", "fields": texts}
