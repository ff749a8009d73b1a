"""`key create|list|revoke|import`, also as K8E's `sandbox api-key` and `sandbox-apikey`. A key is printed once, on stdout."""

from __future__ import annotations

import os
import time

from ..client import calls
from ..errors import InvalidArgument, PermissionDenied
from .approvals import answer_on_terminal
from .output import print_json, say, tell
from .session import open_link
from .tables import for_people, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..model import KeyFields
    from .grammar import Arguments

MAX_IMPORT = 4 * 1024 * 1024


def create(arguments: Arguments) -> int:
    fields: dict[str, object] = {"name": arguments.rest[0], "ttl": arguments.ttl, "quotas": dict(_quotas(arguments))}
    if arguments.scopes:
        fields["scopes"] = arguments.scopes
    link = open_link(arguments)
    try:
        made = link.call(calls.post("/v1/keys", fields))
    except PermissionDenied as refused:
        if not refused.details.get("challenge"):
            raise
        shown = {"name": fields["name"], "scopes": fields["scopes"]}
        answer = answer_on_terminal(link, calls.post("/v1/keys/challenge", shown))
        made = link.call(calls.post("/v1/keys", {**fields, "answer": answer}))
    if for_people(arguments):
        until = "never ends" if made["expires_at"] is None else f"ends {_day(made['expires_at'])}"
        say(f"key {made['name']!r} ({', '.join(made['scopes'])}; {until}). It is not shown again:")
        tell(made["key"])
        return 0
    shown = {key: made[key] for key in ("name", "key", "e2b_key", "ttl_days")}
    dates = {"created_at": _instant(made["created_at"]), "expires_at": _instant(made["expires_at"])}
    print_json({**shown, **dates, "scopes": made["scopes"], "quotas": made["quotas"]})
    return 0


def list_all(arguments: Arguments) -> int:
    found = open_link(arguments).call(calls.get("/v1/keys"))["keys"]
    if for_people(arguments):
        rows = [
            (key["name"], ",".join(key["scopes"]), _day(key["created_at"]), _ends(key), _limits(key)) for key in found
        ]
        table(("NAME", "SCOPES", "CREATED", "ENDS", "QUOTAS"), rows, "no keys; see: atoll key create")
        return 0
    print_json({"keys": [_listed(key) for key in found]})
    return 0


def revoke(arguments: Arguments) -> int:
    found = open_link(arguments).call(calls.post("/v1/keys/revoke", {"name": arguments.rest[0]}))
    if for_people(arguments):
        tell(f"key {found['name']!r} is revoked")
        return 0
    print_json({"ok": True, "name": found["name"]})
    return 0


def bring_in(arguments: Arguments) -> int:
    """K8E's keys.json; the keys in it go on working, and only their hashes are kept."""
    name = arguments.rest[0]
    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            data = file.read(MAX_IMPORT + 1)
        text = data.decode()
    except OSError as failure:
        raise InvalidArgument(f"cannot read {name}: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{os.path.basename(name)} is not UTF-8") from None
    if len(data) > MAX_IMPORT:
        raise InvalidArgument(f"{os.path.basename(name)} has more than {MAX_IMPORT >> 20} MiB")
    found = open_link(arguments).call(calls.post("/v1/keys/import", {"text": text}))["keys"]
    if for_people(arguments):
        table(("NAME", "RESULT"), list(found.items()), "no keys in it")
        return 0
    print_json({"keys": found})
    return 0


def _quotas(arguments: Arguments) -> list[tuple[str, float]]:
    try:
        return [(name, float(value)) for name, value in arguments.quota]
    except ValueError:
        raise InvalidArgument("--quota needs NAME=NUMBER") from None


def _listed(key: KeyFields) -> Mapping[str, object]:
    found = {"name": key["name"], "expired": key["expired"], "created_at": _instant(key["created_at"])}
    if key["expires_at"] is not None:
        found.update(expires_at=_instant(key["expires_at"]), ttl_days=key["ttl_days"])
    return {**found, "scopes": key["scopes"], "quotas": key["quotas"]}


def _instant(seconds: int | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _ends(key: KeyFields) -> str:
    if key["expires_at"] is None:
        return "never"
    return f"{_day(key['expires_at'])}{' (expired)' if key['expired'] else ''}"


def _limits(key: KeyFields) -> str:
    return " ".join(f"{name}={value:g}" for name, value in key["quotas"].items()) or "-"
