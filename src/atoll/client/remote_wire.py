"""What `remote.py` and `remote_async.py` say to a gateway in `atoll.v1`, and what its answers mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from ..errors import AtollError, DaemonUnreachable, OutcomeUnknown
from ..proto.atoll.v1 import atoll_pb2 as pb
from ..surfaces.k8e.grpc.status import error_of
from .http import Head
from .outcome import lost

if TYPE_CHECKING:
    from .calls import Call

PIECE = 256 * 1024
_HEADERS = frozenset(("accept", "content-type"))


def request(call: Call) -> Any:
    headers = [pb.Header(name=k, value=v) for k, v in call.headers if k.lower() in _HEADERS]
    return pb.CallRequest(method=call.method, target=call.target, headers=headers, body=call.body or b"")


def head(answer: Any) -> Head:
    return Head(answer.status, {header.name.lower(): header.value for header in answer.headers})


def failed(call: Call, failure: grpc.RpcError) -> AtollError:
    """The error of a failed call: what the gateway said, or what its silence means for this call."""
    found = error_of(failure, acted=not call.repeatable)
    return lost(call, found.message) if type(found) is OutcomeUnknown and call.command_id else found


def unreached(failure: BaseException) -> AtollError:
    """The error of a connection that was never made."""
    if isinstance(failure, grpc.RpcError):
        return error_of(failure, acted=False)
    return DaemonUnreachable("the gateway gave no answer")
