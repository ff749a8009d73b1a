"""Quotas of a key, where several kinds of things count for one."""

import pytest

from atoll.core.access.credentials import KeyHolder
from atoll.core.access.quotas import reserve
from atoll.errors import Exhausted


def test_volumes_count_as_disk_of_a_new_sandbox() -> None:
    who = KeyHolder("a", 65534, 65534, "key", quotas={"disk_mb": 1000})
    reserve(who, {"disk_mb": 400}, lambda: [], 600)
    with pytest.raises(Exhausted, match="1000"):
        reserve(who, {"disk_mb": 400}, lambda: [], 601)
