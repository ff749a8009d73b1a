"""The table of verbs against core's methods, the REST routes and the client's calls: each verb is authorised and recorded."""

import inspect
import os
from typing import Any

import msgspec
import pytest

from atoll import errors, model
from atoll.client import calls
from atoll.core import Core
from atoll.core.access.audited_verbs import Part
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.principals import local
from atoll.core.verbs import VERBS
from atoll.server.app import PATHS, ROUTES

ME = local(os.geteuid(), os.getegid())
NEVER = {"env", "content", "value", "text", "answer", "stdin", "stdin_b64", "secrets", "secret", "source", "data"}
OF_THE_DAEMON = {"daemon.stop", "daemon.pin"}  # its process is around core, not in it
HELPERS = {"create_watched", "set", "visit", "require", "prepared"}  # each goes through a verb, or is for other verbs
OPENED = {
    "/v1/mcp/http",
    "/v1/functions/open",
    "/v1/agentkernel",
    "/v1/e2b",
}  # a listener for as long as the request lasts


def parts(core: Core) -> list[Part]:
    return [value for value in vars(core).values() if isinstance(value, Part)]


def methods(core: Core) -> dict[str, list[Any]]:
    """The methods that name each row."""
    found: dict[str, list[Any]] = {}
    for part in parts(core):
        for _, method in inspect.getmembers(type(part), inspect.isfunction):
            if name := getattr(method, "verb", ""):
                names = [row for row in VERBS if row.startswith("files.")] if name == "files" else [name]
                for row in names:
                    found.setdefault(row, []).append(method)
    return found


async def test_every_method_that_takes_a_caller_names_a_row(core: Core) -> None:
    bare = []
    for part in parts(core):
        for name, method in inspect.getmembers(type(part), inspect.isfunction):
            takes = "who" in inspect.signature(method).parameters and not name.startswith("_")
            waits = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(inspect.unwrap(method))
            if takes and waits and not hasattr(method, "verb") and name not in HELPERS | {"wake"}:
                bare.append(f"{type(part).__name__}.{name}")
    assert bare == []
    assert set(VERBS) - set(methods(core)) == OF_THE_DAEMON


async def test_what_is_recorded_exists_and_is_no_secret(core: Core) -> None:
    for name, found in methods(core).items():
        row = VERBS[name]
        known = {word for method in found for word in inspect.signature(method).parameters}
        for request in (row.request, model.RunSpec if name.startswith("commands.") else None, model.CreateSandbox):
            known |= set(request.__struct_fields__) if request is not None else set()
        if name in ("files.write", "files.tar_in"):
            known.add("user")  # of their **options
        assert set(row.audited) <= known, name
        assert not NEVER & set(row.audited), name
        assert row.writes or not row.audited, name
        assert all(VERBS[other].writes and not VERBS[other].through for other in row.through), name


async def test_a_key_without_the_scope_is_refused_by_core_itself(core: Core) -> None:
    """Not only by a door: a door that forgets to ask gives nothing away, and leaves no record of a thing not begun."""
    asks = KeyHolder("key:a", 65534, 65534, "key", "a", "a", ("approve",))
    uses = KeyHolder("key:b", 65534, 65534, "key", "b", "b", ("use",))
    begun = core.audit.seq
    for name, found in methods(core).items():
        for who in (asks, uses):
            if VERBS[name].scope == "own" or (VERBS[name].scope == "use" and who is uses):
                continue
            for method in found:
                part = next(part for part in parts(core) if isinstance(part, _class_of(core, method)))
                needed = list(inspect.signature(method).parameters)[2:]
                given = {word: name.split(".")[-1] if word == "op" else None for word in needed if word != "options"}
                with pytest.raises(errors.PermissionDenied):
                    made = method(part, who, **given)
                    await (anext(made) if inspect.isasyncgen(made) else made)
    assert core.audit.seq == begun


def _class_of(core: Core, method: Any) -> type[Part]:
    return next(type(part) for part in parts(core) if getattr(type(part), method.__name__, None) is method)


def test_every_route_names_a_verb_or_changes_nothing_of_core() -> None:
    for (method, pattern), route in ROUTES.items():
        path = PATHS[method, pattern]
        if route.verb:
            assert route.scope == VERBS[route.verb].scope
            continue
        assert path.startswith("/functions") or method == "GET" or path in OPENED, f"{method} {path} names no verb"
        assert not path.startswith("/functions") or route.scope == "admin"


def test_the_client_repeats_what_the_table_allows() -> None:
    box = "box"
    made = {
        "destroy": calls.destroy(box), "get": calls.info(box), "list": calls.list_sandboxes(), "create": calls.create({}),
        "commands.kill": calls.kill(box, "c"), "commands.signal": calls.signal(box, "c", 15),
        "commands.poll": calls.poll(box, "c"), "commands.resize": calls.resize(box, "c", 1, 1),
        "commands.exec": calls.start(box, "true"), "commands.stdin": calls.send_stdin(box, "c", b""),
        "stop": calls.lifecycle(box, "stop"), "snapshots.save": calls.save_snapshot(box, "s"),
        "snapshots.delete": calls.delete_snapshot("s"), "snapshots.restore": calls.restore_snapshot("s", {}),
        "commands.attach": calls.attach(box, "c"),
    }  # fmt: skip
    assert {name: call.repeatable for name, call in made.items()} == {name: VERBS[name].repeatable for name in made}


async def test_keys_are_recorded_from_beginning_to_end(core: Core) -> None:
    verbs = core.key_verbs
    made = await verbs.create(ME, model.CreateKey(name="robot"))
    with pytest.raises(errors.AlreadyExists):
        await verbs.create(ME, model.CreateKey(name="robot"))
    await verbs.revoke(ME, model.NamedKey(name="robot"))
    await verbs.bring_in(ME, model.ImportKeys(text='{"version": 1, "keys": {}}'))
    with pytest.raises(errors.NotFound):
        await verbs.revoke_certificate(ME, model.NamedCertificate(fingerprint="0" * 64))
    found = [record for record in core.audit.read() if record["action"].startswith(("keys.", "certificates."))]
    assert [(record["action"], record["result"]) for record in found] == [
        ("keys.create", "begun"), ("keys.create", "ok"), ("keys.create", "begun"), ("keys.create", "already_exists"),
        ("keys.revoke", "begun"), ("keys.revoke", "ok"), ("keys.import", "begun"), ("keys.import", "ok"),
        ("certificates.revoke", "begun"), ("certificates.revoke", "not_found"),
    ]  # fmt: skip
    assert found[0]["details"] == {"name": "robot", "scopes": ["use"], "ttl": "30d"}
    assert made["key"] not in msgspec.json.encode(found).decode()


async def test_images_are_recorded_even_where_there_is_no_store(core: Core) -> None:
    with pytest.raises(errors.Unsupported):
        async for _ in core.image_verbs.pull(ME, model.PullImage(name="alpine")):
            pass
    with pytest.raises(errors.Unsupported):
        await core.image_verbs.prune(ME, model.Request())
    found = [(record["action"], record["result"]) for record in core.audit.read()]
    assert found == [("images.pull", "begun"), ("images.pull", "unsupported"), ("images.prune", "begun"),
                     ("images.prune", "unsupported")]  # fmt: skip
