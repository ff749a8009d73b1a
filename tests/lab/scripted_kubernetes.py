"""An API server and a controller that do what a test says, for machines without a cluster and for answers a real one gives rarely.

It knows the verbs and objects that the backend uses, and nothing of admission, schemas or rights: what sandboxes promise is
tested on the real cluster. Agents are real ones, as plain processes.
"""

import asyncio
import copy
import json
import os
import secrets
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn

from atoll.backends.contract import NetworkEvents
from atoll.backends.kubernetes import KubernetesBackend, Settings
from atoll.backends.kubernetes.agents import Agents
from atoll.backends.kubernetes.channel import GatewayKey
from atoll.backends.kubernetes.claims import Identity
from atoll.backends.local import binaries

Object = dict[str, Any]
NAMESPACE = "sandbox-matrix"
CLAIM_UID, NAME_HASH = "agents.x-k8s.io/claim-uid", "agents.x-k8s.io/sandbox-name-hash"


class ScriptedApi:
    """Objects by kind and name, and who watches them. `controller` is called for each new claim."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {}
        self.calls: list[tuple[str, str]] = []
        self.refuse: Callable[[str, str], tuple[int, str] | None] = lambda method, kind: None
        self.controller: Callable[[Object], Any] = self.start_cold
        self._version = 100
        self._history: list[tuple[int, str, str]] = []  # version, kind, event: a watch begins with what it has missed
        self._watchers: list[tuple[str, asyncio.Queue[str | None]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def put(self, kind: str, value: Object) -> Object:
        things = self.objects.setdefault(kind, {})
        name = value["metadata"]["name"]
        self._tell(kind, value, "MODIFIED" if name in things else "ADDED")
        things[name] = value
        return value

    def remove(self, kind: str, name: str) -> None:
        if (value := self.objects.get(kind, {}).pop(name, None)) is not None:
            self._tell(kind, value, "DELETED")

    def cut_watches(self) -> None:
        """End every watch, as a server that is stopped does."""
        for _, queue in self._watchers:
            queue.put_nowait(None)

    def _tell(self, kind: str, value: Object, event: str) -> None:
        self._version += 1
        value["metadata"].setdefault("uid", str(uuid.uuid4()))
        value["metadata"]["resourceVersion"] = str(self._version)
        line = json.dumps({"type": event, "object": value}) + "\n"
        self._history.append((self._version, kind, line))
        for watched, queue in self._watchers:
            if watched == kind:
                queue.put_nowait(line)

    # The controller

    async def start_cold(self, claim: Object) -> None:
        """Make a Sandbox and a pod below the claim, and say that it is ready."""
        await asyncio.sleep(0.01)
        name, uid = claim["metadata"]["name"], claim["metadata"]["uid"]
        sandbox = self.put("sandboxes", {"metadata": {"name": name, "ownerReferences": [{"uid": uid}]}})
        self.put_pod(name, sandbox["metadata"]["uid"], uid)
        claim["status"] = {"sandbox": {"name": name}, "conditions": [{"type": "Ready", "status": "True"}]}
        self.put("sandboxclaims", claim)

    def put_pod(self, name: str, sandbox_uid: str, claim_uid: str) -> Object:
        labels = {NAME_HASH: "1", CLAIM_UID: claim_uid}
        container = {"name": "sandbox", "restartCount": 0, "state": {"running": {}}}
        status = {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [container]}
        metadata = {"name": name, "labels": labels, "ownerReferences": [{"uid": sandbox_uid}]}
        return self.put("pods", {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": status})

    def end_container(self, pod: str, **how: Any) -> None:
        value = copy.deepcopy(self.objects["pods"][pod])
        value["status"]["containerStatuses"][0]["state"] = {"terminated": how}
        self.put("pods", value)

    async def switch(self, sandbox: Object) -> None:
        """Take the pod of a suspended Sandbox away, and give one that runs a new pod."""
        await asyncio.sleep(0.01)
        name, stopped = sandbox["metadata"]["name"], sandbox["spec"]["operatingMode"] == "Suspended"
        if stopped:
            self.remove("pods", name)
        elif name not in self.objects["pods"]:
            (owner,) = sandbox["metadata"]["ownerReferences"]
            self.put_pod(name, sandbox["metadata"]["uid"], owner["uid"])
        sandbox["status"] = {"conditions": [{"type": "Suspended", "status": str(stopped)}]}
        self.put("sandboxes", sandbox)

    def delete_claim(self, name: str) -> None:
        self._spawn(self._collect(name))

    async def _collect(self, name: str) -> None:
        """Delete a claim, and a moment later what is below it, as the garbage collector does."""
        for kind in ("sandboxclaims", "sandboxes", "pods"):
            self.remove(kind, name)
            await asyncio.sleep(0.01)

    # HTTP

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        words = scope["path"].strip("/").split("/")
        if "namespaces" in words and query.get("watch"):
            return await self._watch(words[words.index("namespaces") + 2], query, send)
        status, value = self._answer(scope["method"], words, query, json.loads(body or b"{}"))
        data = value if isinstance(value, str) else json.dumps(value)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": data.encode()})

    def _answer(self, method: str, words: list[str], query: dict[str, str], body: Object) -> tuple[int, Any]:
        if words[0] == "version":
            return 200, {"gitVersion": "v1.36.4"}
        if "namespaces" not in words:
            return 200, {"versions": [{"version": "v1beta1"}], "items": []}
        kind, *rest = words[words.index("namespaces") + 2 :]
        self.calls.append((method, kind))
        if refused := self.refuse(method, kind):
            return refused[0], {"message": refused[1]}
        things = self.objects.setdefault(kind, {})
        if method == "POST":
            return self._create(kind, body)
        if not rest:
            items = [value for value in things.values() if _selected(value, query)]
            return 200, {"metadata": {"resourceVersion": str(self._version)}, "items": items}
        if rest[1:] == ["log"]:
            return 200, f"atoll-agent 1 {'ab' * 32}\n"
        found = things.get(rest[0])
        if found is None:
            return 404, {"message": f"{kind} {rest[0]} not found"}
        return self._change(method, kind, found, body)

    def _create(self, kind: str, body: Object) -> tuple[int, Any]:
        if body["metadata"]["name"] in self.objects.setdefault(kind, {}):
            return 409, {"message": f"{kind} {body['metadata']['name']} already exists"}
        made = copy.deepcopy(self.put(kind, body))
        self._spawn(self.controller(body))
        return 201, made

    def _change(self, method: str, kind: str, found: Object, body: Object) -> tuple[int, Any]:
        wanted = body.get("preconditions", body.get("metadata", {})).get("uid", found["metadata"]["uid"])
        if wanted != found["metadata"]["uid"]:
            return 409, {"message": "the UID is another one"}
        if method == "DELETE":
            self.delete_claim(found["metadata"]["name"])
        elif method == "PATCH":
            _merge(found, body)
            self.put(kind, found)
            if kind == "sandboxes":
                self._spawn(self.switch(found))
        return 200, found

    async def _watch(self, kind: str, query: dict[str, str], send: Any) -> None:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        for version, told, line in self._history:
            if told == kind and version > int(query["resourceVersion"]):
                queue.put_nowait(line)
        self._watchers.append((kind, queue))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while (line := await queue.get()) is not None:
                if _selected(json.loads(line)["object"], query):
                    await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._watchers.remove((kind, queue))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PlainAgents(Agents):
    """Activation starts a real agent as a plain process, reached by a Unix socket."""

    def __init__(self, key: GatewayKey, directory: Path) -> None:
        super().__init__(key)
        self._directory = directory
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def activate(self, identity: Identity, fingerprint: str, boot: Any, api_server: Any) -> dict[str, Any]:
        if identity.pod_uid in self.processes:
            return {"again": True}
        self._path = self._directory / f"{secrets.token_hex(4)}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        listener.listen(8)
        process = await asyncio.create_subprocess_exec(
            str(binaries.guest()), "agent", stdin=asyncio.subprocess.PIPE, pass_fds=[listener.fileno()]
        )
        assert process.stdin is not None
        told = {key: value for key, value in boot.items() if key != "filter"}
        process.stdin.write(json.dumps({**told, "listen_fd": listener.fileno()}).encode())
        process.stdin.close()
        listener.close()
        self.processes[identity.pod_uid] = process
        return {"again": False}

    def dialler(self, address: str, fingerprint: str) -> Any:
        path = self._path

        async def connect() -> Any:
            return await asyncio.open_unix_connection(str(path))

        return connect

    async def close(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def scripted_backend(directory: Path, **settings: Any) -> AsyncIterator[tuple[ScriptedApi, KubernetesBackend]]:
    """A backend on a scripted cluster with one pool, `python`."""
    api, key = ScriptedApi(), GatewayKey.generate()
    (directory / "key").write_bytes(key.to_pem())
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(api, log_level="critical", lifespan="off", interface="asgi3")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    config_file = directory / "kubeconfig"
    config_file.write_text(_kubeconfig(listener.getsockname()[1]))
    backend = KubernetesBackend(Settings(directory / "key", kubeconfig=str(config_file), **settings))
    agents = backend._agents = PlainAgents(key, directory)
    put_pool(api, "python", "container", key.public)
    try:
        await backend.start(NetworkEvents())
        yield api, backend
        await backend.close()
    finally:
        await agents.close()
        api.cut_watches()
        server.should_exit = True
        await serving
        os.unlink(config_file)


def put_pool(api: ScriptedApi, name: str, runtime: str, key: str, *, volume: bool = False) -> None:
    """Add a template that the backend accepts, and its pool."""
    container = {
        "name": "sandbox",
        "command": ["/.atoll/guest", "pod", "--gateway-key", key],
        "securityContext": {"capabilities": {"drop": ["ALL"]}},
        "resources": {"limits": {"cpu": "1", "memory": "512Mi"}},
    }
    pod = {
        "restartPolicy": "Never",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "containers": [container],
    }
    ingress = [{"from": [{"ipBlock": {"cidr": "192.0.2.1/32"}}], "ports": [{"port": 2024}]}]
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "labels": {"atoll.dev/runtime": runtime},
        "annotations": {"atoll.dev/image": "python:3", "atoll.dev/default": "true"},
    }
    spec = {"podTemplate": {"spec": pod}, "networkPolicy": {"ingress": ingress, "egress": []}}
    if volume:
        container["volumeMounts"] = [{"name": "workspace", "mountPath": "/workspace"}]
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "workspace"}}]
    api.put("sandboxtemplates", {"metadata": metadata, "spec": spec})
    reference = {"replicas": 0, "sandboxTemplateRef": {"name": name}}
    api.put("sandboxwarmpools", {"metadata": {"name": name}, "spec": reference})


def _selected(value: Object, query: dict[str, str]) -> bool:
    name, _, wanted = query.get("labelSelector", "").partition("=")
    labels = value["metadata"].get("labels", {})
    return not name or (labels.get(name) == wanted if wanted else name in labels)


def _merge(value: Object, change: Object) -> None:
    for key, new in change.items():
        if isinstance(new, dict):
            _merge(value.setdefault(key, {}), new)
        else:
            value[key] = new


def _kubeconfig(port: int) -> str:
    cluster = {"server": f"http://127.0.0.1:{port}"}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": "test"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
    )
