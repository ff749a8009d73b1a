"""F2-L3: nobody makes an approver for their own requests, by no chain of keys."""

import json
import secrets

import pytest
from lab.principals import key

from atoll import errors
from atoll.core import Core
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.keys import Key
from atoll.model import CreateSandbox


def holder(made: Key) -> KeyHolder:
    return KeyHolder(f"key:{made.name}", 65534, 65534, "key", made.name, made.id, made.scopes)


async def test_an_approver_that_comes_from_the_one_who_asks_is_refused(core: Core) -> None:
    keys = core.keys
    admin = holder(keys.create("adm", scopes=("admin",), created_by="uid:0").key)
    sandbox = await core.sandboxes.create(admin, CreateSandbox())
    approval = (await core.approvals.request(admin, sandbox.id, "wipe everything")).id
    twin = keys.create("twin", scopes=("approve",), created_by=admin.owner).key
    middle = keys.create("middle", scopes=("admin",), created_by=admin.owner).key
    far = keys.create("far", scopes=("approve",), created_by="key:middle").key
    keys.revoke("middle")
    text = json.dumps({"brought": secrets.token_hex(32)})
    keys.import_k8e(text, scopes=("approve",), created_by=admin.owner)
    for made in (twin, middle, far, keys.get("brought")):
        with pytest.raises(errors.PermissionDenied):
            await core.approvals.decide(holder(made), approval, True)
    other = keys.create("other", scopes=("approve",), created_by="uid:0").key
    assert (await core.approvals.decide(holder(other), approval, True)).status == "approved"


async def test_the_maker_of_a_key_may_decide_for_it(core: Core) -> None:
    """The other direction is how approvals are meant: an operator's key decides what a key it made asks for."""
    agent = key("agent", "use")
    sandbox = await core.sandboxes.create(agent, CreateSandbox())
    approval = (await core.approvals.request(agent, sandbox.id, "x")).id
    boss = core.keys.create("boss", scopes=("admin",), created_by="uid:0").key
    core.keys.create("agent", created_by="key:boss")
    assert (await core.approvals.decide(holder(boss), approval, True)).status == "approved"
