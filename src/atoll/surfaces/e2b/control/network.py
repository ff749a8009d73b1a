"""From the contract's network configuration to atoll's list of hosts, and changing it."""

from collections.abc import Mapping

import msgspec

from atoll import errors
from atoll.model import ChangeHosts
from atoll.server.request import Exchange
from atoll.surfaces.e2b.control.table import body_of, known, route
from atoll.surfaces.e2b.replies import WireError, nothing
from atoll.surfaces.e2b.served import Served
from atoll.surfaces.e2b.words import NetworkConfig, NetworkUpdate, state_of

EVERYTHING = "0.0.0.0/0"
NOTES = "e2b"


def hosts_of(network: NetworkConfig, internet: bool | None) -> list[str] | None:
    """Return the hosts that may be reached; None is the operator's list. What atoll cannot hold is InvalidArgument."""
    for name in ("rules", "egress_proxy", "mask_request_host", "https_ports"):
        if getattr(network, name):
            shown = name.split("_")[0] + "".join(word.title() for word in name.split("_")[1:])
            raise errors.InvalidArgument(f"network.{shown} is not supported by this server")
    allowed, denied = network.allow_out or [], network.deny_out or []
    if any(entry != EVERYTHING for entry in denied):
        raise errors.InvalidArgument(
            f"network.denyOut: this server can deny everything ({EVERYTHING}) and then allow names",
            hint="list what may be reached in allowOut",
        )
    closed = bool(denied) or internet is False
    for entry in allowed:
        if entry.replace(".", "").replace("/", "").isdigit() or ":" in entry:
            raise errors.InvalidArgument(f"network.allowOut: {entry!r:.80} is no name; this server allows names only")
        if not denied:
            raise errors.InvalidArgument(f"network.allowOut has names, so denyOut must hold {EVERYTHING}")
    if not closed:
        return None
    return allowed


@route("PUT", "sandboxes/*/network")
async def change_network(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, NetworkUpdate, optional=True)
    info = await known(app, exchange)
    if state_of(info) != "running":
        raise WireError(409, "the sandbox is not running")
    config = NetworkConfig(
        allow_out=asked.allowOut,
        deny_out=asked.denyOut,
        dns_servers=asked.dnsServers,
        rules=asked.rules,
        egress_proxy=asked.egressProxy,
    )
    hosts = hosts_of(config, asked.allow_internet_access)
    await app.core.hosts.change(exchange.who, info.id, ChangeHosts(hosts=hosts))
    shown: Mapping[str, object] = {
        key: value for key, value in msgspec.to_builtins(config).items() if value is not None
    }
    noted = {"network": shown, "internet": asked.allow_internet_access}
    await app.core.notes.change(exchange.who, info.id, NOTES, noted)
    await nothing(exchange)
