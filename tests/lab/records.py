"""Rows for tests of the records."""

import time
from collections.abc import Callable
from typing import Any

from atoll.core.store.database import Database

Open = Callable[[], Database]


def sandbox(name: str, owner: str = "me", **fields: Any) -> Any:
    base = {"id": f"id-{name}", "owner": owner, "name": name, "state": "running", "runtime": "container"}
    more = {"image": "host", "spec": {}, "record": {}, "created_at": 1.5, "last_active": 2.25}
    return {**base, **more, **fields}


def command(name: str, **fields: Any) -> Any:
    base = {"id": name, "argv": ["echo", name], "language": None, "background": False, "body": "", "spec": {}}
    return {**base, "started_at": time.time(), **fields}


def approval(name: str, **fields: Any) -> Any:
    base = {"id": name, "sandbox_id": "id-a", "owner": "me", "kind": "exec", "action": "rm", "digest": "d"}
    return {**base, "status": "pending", "requested_at": 1.0, "expires_at": 9.0, "sessions": [1, 2], **fields}
