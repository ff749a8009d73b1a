"""Every REST route, as keys reach them over TLS, for four callers: the owner of a sandbox, another key that guesses its
ids, one whose key is wrong, and one whose key was revoked.

The routes come from the table the daemon serves. A new one that none of the groups below covers fails the test.
"""

import json
import secrets
import types
import typing
from typing import Any

import msgspec
import pytest

from atoll import errors
from atoll.client import calls
from atoll.client._sync.secure import RemoteLink
from atoll.client._sync.tunnel import open_tunnel
from atoll.model import convert
from atoll.server.app import PATHS, ROUTES

ALL = sorted((method, PATHS[method, pattern], pattern) for method, pattern in ROUTES)
IDS = [f"{method} {path}" for method, path, _ in ALL]

OF_A_SANDBOX = "/v1/sandboxes/{ref}"
OF_A_NAME = (
    "/v1/snapshots/{name}", "/v1/secrets/{name}", "/v1/approvals/{approval}", "/v1/checkpoints/{name}", "/v1/volumes/{name}",
)  # fmt: skip
SHARED = {"/v1/health", "/v1/openapi.json", "/v1/runtimes", "/v1/images", "/v1/images/detect", "/v1/images/inspect"}
OWN_LISTS = {
    "/v1/sandboxes", "/v1/sessions", "/v1/snapshots", "/v1/secrets", "/v1/approvals", "/v1/audit", "/v1/checkpoints", "/v1/volumes",
}  # fmt: skip
OWN_MAKERS = {
    "/v1/sandboxes",
    "/v1/sessions",
    "/v1/run",
    "/v1/manifests",
    "/v1/volumes",
}  # what they make belongs to the caller
OWN_CHECKS = {"/v1/audit/verify"}
PLACES = ("path", "src", "dst", "target", "link")
QUERY = {"path": "/workspace/x", "name": "host", "program": "sh", "of": "restrictive"}


class Caller:
    def __init__(self, gateway: Any, key: str, name: str = "") -> None:
        self.name = name
        ca = str(gateway.home / "tls" / "sandbox-ca.crt")
        self.link = RemoteLink(gateway.endpoint, api_key=key, ca_cert=ca)

    def call(self, method: str, target: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = (("Content-Type", "application/json"),) if body is not None else ()
        answer = self.link.open(calls.Call(method, target, data, headers, timeout=120))
        return answer.head.status, answer.body().decode("utf-8", "replace")


class Lab:
    """What the owner has, of every kind that has an id or a name."""

    def __init__(self, gateway: Any) -> None:
        mark = secrets.token_hex(4)
        self.owner, self.other = (
            Caller(gateway, gateway.key(f"{name}-{mark}").secret, f"key:{name}-{mark}") for name in ("own", "curious")
        )
        name = f"left-{mark}"
        self.left = Caller(gateway, gateway.key(name).secret)
        gateway.revoke(name)
        self.wrong = Caller(gateway, secrets.token_hex(32))
        self.made = self.do("POST", "/v1/sandboxes", {"limits": {"memory_mb": 256}, "alias": f"work-{mark}"})
        self.sandbox = f"/v1/sandboxes/{self.made['id']}"
        self.do("PUT", f"/v1/secrets/s-{mark}", {"key": "k", "value": f"canary-{mark}"})
        self.do("POST", f"{self.sandbox}/snapshots", {"name": f"snap-{mark}"})
        approval = self.do("POST", f"{self.sandbox}/approvals", {"action": "x"})["id"]
        command = self.do("POST", f"{self.sandbox}/exec", {"command": "sleep 600", "background": True})["command_id"]
        shell = self.do("POST", f"{self.sandbox}/shells", {"language": "bash"})["shell_id"]
        self.real = {"ref": self.made["id"], "approval": approval, "cid": command, "sid": shell, "port": "8000"}
        self.names = {"snapshots": f"snap-{mark}", "secrets": f"s-{mark}"}
        self.canary = f"canary-{mark}"

    def do(self, method: str, target: str, body: Any = None) -> Any:
        status, text = self.owner.call(method, target, body)
        assert status < 300, text
        return json.loads(text) if text else None

    def target(self, path: str, query: tuple[str, ...], **other: str) -> str:
        words = {**self.real, "name": self.names.get(f"{path}//".split("/")[2], "no-such-name"), **other}
        asked = "&".join(f"{key}={QUERY[key]}" for key in query if key in QUERY)
        return path.format(**words) + (f"?{asked}" if asked else "")


@pytest.fixture(scope="module")
def lab(gateway):
    made = Lab(gateway)
    yield made
    made.do("DELETE", f"/v1/snapshots/{made.names['snapshots']}")
    made.do("DELETE", made.sandbox)


def sample(kind: type[Any] | None) -> Any:
    """A request that would be good if it came from the owner."""
    if kind is None:
        return None
    special = {"ExecSpec": {"argv": ["true"]}, "RunSpec": {"code": "true"}, "ChangeHosts": {"add": ["example.com"]},
               "Extend": {"lifetime_s": 60}, "RunOnce": {"command": {"argv": ["true"]}}, "Signal": {"signal": 15},
               "CreateFromManifest": {"manifest": "entries: []"}, "NamedCertificate": {"fingerprint": "0" * 64}}  # fmt: skip
    found = special.get(kind.__name__)
    if found is None:
        fields = msgspec.structs.fields(kind)
        found = {f.encode_name: _value(f.name, f.type) for f in fields if f.required or f.name in PLACES}
    convert(kind, found)  # a route whose request this cannot make needs a line above
    return found


def _value(name: str, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _value(name, typing.get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        return _value(name, typing.get_args(kind)[0])
    if kind is bool:
        return True
    if kind in (int, float):
        return 24
    if origin is list:
        return [_value(name, typing.get_args(kind)[0])]
    if origin is dict:
        return {}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return sample(kind)
    return "/workspace/x" if name in PLACES else "example"


@pytest.mark.parametrize(("method", "path", "pattern"), ALL, ids=IDS)
def test_k8e_D15_a_stranger_gets_nowhere(lab, method, path, pattern) -> None:
    """A wrong key and a revoked one, on every route, with a request that is otherwise good."""
    body = sample(ROUTES[method, pattern].kind)
    for caller in (lab.wrong, lab.left):
        status, text = caller.call(method, lab.target(path, ROUTES[method, pattern].query), body)
        assert status == 401 and json.loads(text)["error"]["code"] == "unauthenticated"
        assert lab.canary not in text


@pytest.mark.parametrize(("method", "path", "pattern"), ALL, ids=IDS)
def test_k8e_D15_the_curious_learn_nothing(lab, method, path, pattern) -> None:
    """Somebody else's thing answers exactly like one that never was; what is the machine's needs another scope; what is
    everybody's holds nothing of the owner."""
    route = ROUTES[method, pattern]
    body = sample(route.kind)
    if path == OF_A_SANDBOX or path.startswith((f"{OF_A_SANDBOX}/", *OF_A_NAME)):
        if (method, path) in (("PUT", "/v1/secrets/{name}"), ("PUT", "/v1/snapshots/{name}/archive")):
            lab.other.call(method, lab.target(path, route.query), body)  # a name of one's own, the owner's is as it was
        else:
            _alike(lab, method, path, route, body)
    elif path in SHARED and method == "GET":
        status, text = lab.other.call(method, lab.target(path, route.query), body)
        assert status < 500 and lab.made["id"] not in text and lab.canary not in text
    elif path in OWN_LISTS and method == "GET":
        status, text = lab.other.call(method, path)
        assert status == 200, text
        if path == "/v1/audit":  # what it asked for itself is there, in its own words
            assert {record["who"] for record in json.loads(text)["records"]} <= {lab.other.name}
        else:
            for secret in (lab.made["id"], lab.canary, *lab.names.values(), lab.real["approval"]):
                assert secret not in text
    elif path in OWN_CHECKS or (path in OWN_MAKERS and method == "POST"):
        pass  # nothing of another's is named in the request
    else:
        status, text = lab.other.call(method, lab.target(path, route.query), body)
        assert status == 403, f"{method} {path} is open to every key; is it meant to be?"


def _alike(lab: Lab, method: str, path: str, route: Any, body: Any) -> None:
    nothing = "".join(secrets.choice("abcdefghij") for _ in range(20))
    here = lab.target(path, route.query)
    none = {
        "ref": nothing,
        "approval": lab.real["approval"].replace(lab.made["id"], nothing),
        "name": f"snap-{nothing}",
    }
    if path.startswith("/v1/secrets"):
        none["name"] = f"s-{nothing}"
    theirs, missing = (lab.other.call(method, target, body) for target in (here, lab.target(path, route.query, **none)))
    assert theirs[0] == missing[0], (theirs, missing)
    assert theirs[0] in (403, 404, 200), theirs
    assert theirs[0] != 403 or "approve" in theirs[1]
    assert theirs[0] != 200 or (method, path) == ("DELETE", "/v1/secrets/{name}"), theirs
    real = {**lab.real, "name": lab.names.get(path.split("/")[2], "no-such-name")}
    plain = []
    for text, words in ((theirs[1], real), (missing[1], none)):
        for word in (words["approval"], words["name"], words["ref"]):
            text = text.replace(word, "ID")
        plain.append(text)
    assert plain[0] == plain[1]


def test_k8e_D15_after_all_that_the_owner_has_everything(lab) -> None:
    assert lab.do("POST", f"{lab.sandbox}/exec", {"argv": ["true"]})["exit_code"] == 0
    assert lab.do("GET", f"{lab.sandbox}/commands/{lab.real['cid']}")["status"] == "running"
    shells = lab.do("GET", f"{lab.sandbox}/shells")["shells"]
    assert [(shell["shell_id"], shell["state"]) for shell in shells] == [(lab.real["sid"], "idle")]
    assert lab.do("GET", f"/v1/approvals/{lab.real['approval']}")["status"] == "pending"
    assert lab.do("GET", f"/v1/snapshots/{lab.names['snapshots']}")["name"] == lab.names["snapshots"]
    assert lab.names["secrets"] in json.dumps(lab.do("GET", "/v1/secrets"))


def test_k8e_D15_a_port_of_another_is_no_port(lab) -> None:
    """The WebSocket, which no route stands for."""
    answers = []
    for ref in (lab.made["id"], "".join(secrets.choice("abcdefghij") for _ in range(20))):
        with pytest.raises(errors.NotFound) as caught:
            open_tunnel(lab.other.link, ref, 8000)
        answers.append(str(caught.value).replace(ref, "ID"))
    assert answers[0] == answers[1]
    for caller in (lab.wrong, lab.left):
        with pytest.raises(errors.Unauthenticated):
            open_tunnel(caller.link, lab.made["id"], 8000)
