"""Login: a certificate in place of a key."""

from __future__ import annotations

from typing import Any

from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.server.tls import Authority


class Account:
    core: Core
    authority: Authority

    async def Login(self, who: Principal, request: Any) -> Any:
        verbs = self.core.key_verbs
        leaf = await verbs.issue_certificate(who, self.authority, request.csr, request.device_name)
        return pb.LoginResponse(cert=leaf.cert_pem, ca_cert=leaf.ca_pem, valid_days=leaf.valid_days)
