"""Login: a certificate in place of a key."""

from __future__ import annotations

from typing import Any

from atoll.core.access.credentials import Doorkeeper, KeyHolder
from atoll.core.access.principals import Principal
from atoll.errors import FailedPrecondition
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.server.tls import Authority


class Account:
    keeper: Doorkeeper
    authority: Authority

    async def Login(self, who: Principal, request: Any) -> Any:
        """A client certificate that says the key's name, and counts only as long as the key does."""
        if not isinstance(who, KeyHolder):
            raise FailedPrecondition("a local caller needs no certificate", hint="log in with an API key")
        key = self.keeper.keys.current(who.key_id)
        leaf = self.authority.issue(request.csr, key.name, key.id, device=request.device_name, until=key.expires_at)
        return pb.LoginResponse(cert=leaf.cert_pem, ca_cert=leaf.ca_pem, valid_days=leaf.valid_days)
