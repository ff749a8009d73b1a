"""The way out of sandboxes: by name, brokered, refused by default, and seen.

    egress = await Egress.start(state_dir, broker_uid, on_event)
    link = await egress.attach(sandbox_id, netns_fd, EgressPolicy.of(default_hosts()))

A sandbox without network is one that was never attached.
"""

from atoll.egress.broker import carrier
from atoll.egress.broker.sandbox import UPLOAD, EgressEvent
from atoll.egress.control.carried import CarriedEgress
from atoll.egress.control.service import Egress, Kept
from atoll.egress.limits import Limits
from atoll.egress.policy import HOST_NAME, EgressPolicy, HostRule, Verdict, parse_hosts
from atoll.egress.presets import default_hosts, mode, mode_names, registries, run_hosts
from atoll.egress.router.router import Link

__all__ = [
    "HOST_NAME",
    "UPLOAD",
    "CarriedEgress",
    "Egress",
    "EgressEvent",
    "EgressPolicy",
    "HostRule",
    "Kept",
    "Limits",
    "Link",
    "Verdict",
    "carrier",
    "default_hosts",
    "mode",
    "mode_names",
    "parse_hosts",
    "registries",
    "run_hosts",
]
