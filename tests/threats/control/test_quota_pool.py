"""CTL-12: a key that is over its quota costs nothing: no warm sandbox is taken for it and thrown away."""

import pytest

from atoll import errors
from atoll.core import Core
from atoll.core.access.credentials import NOBODY, KeyHolder
from atoll.model import CreateSandbox


async def test_a_refused_create_takes_no_spare(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    who = KeyHolder("key:full", NOBODY, NOBODY, "key", "full", "k", ("use",), {"sandboxes": 0})
    taken: list[object] = []
    monkeypatch.setattr(core.backend, "reserve", lambda *asked: taken.append(asked))
    with pytest.raises(errors.Exhausted):
        await core.sandboxes.create(who, CreateSandbox())
    assert taken == []
