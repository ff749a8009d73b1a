"""The gateway's side of a pod's channels (docs/kubernetes-activation.md)."""

from atoll.backends.kubernetes.channel.gateway_key import GatewayKey
from atoll.backends.kubernetes.channel.orders import Refused, order
from atoll.backends.kubernetes.channel.tls import ACTIVATE, AGENT, EGRESS, dial

__all__ = ["ACTIVATE", "AGENT", "EGRESS", "GatewayKey", "Refused", "dial", "order"]
