"""Calls of the Kubernetes API, with atoll's errors. kr8s brings transport, credentials and their renewal."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from atoll.errors import (
    AlreadyExists,
    AtollError,
    Conflict,
    Exhausted,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)

Object = dict[str, Any]

CORE = "v1"
AGENTS = "agents.x-k8s.io/v1beta1"
EXTENSIONS = "extensions.agents.x-k8s.io/v1beta1"
CALL_TIMEOUT = 30.0
WATCH_SECONDS = 300
RIGHTS = "give the gateway the rights that docs/kubernetes.md lists; the chart's Role has them"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects: its API version and its name in paths."""

    version: str
    plural: str
    namespaced: bool = True


CLAIMS = Kind(EXTENSIONS, "sandboxclaims")
TEMPLATES = Kind(EXTENSIONS, "sandboxtemplates")
POOLS = Kind(EXTENSIONS, "sandboxwarmpools")
SANDBOXES = Kind(AGENTS, "sandboxes")
PODS = Kind(CORE, "pods")
EVENTS = Kind(CORE, "events")
RUNTIME_CLASSES = Kind("node.k8s.io/v1", "runtimeclasses", namespaced=False)


class Gone(AtollError):
    """The version from which a watch was to go on is too old."""


class Cluster:
    """The API server, and the one namespace that is used."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    @staticmethod
    async def connect(kubeconfig: str, context: str, namespace: str) -> "Cluster":
        """Find the credentials and ask the server for its version."""
        try:
            from kr8s.asyncio import Api
        except ImportError:
            hint = "pip install 'atoll[kubernetes]'"
            raise Unsupported("the Kubernetes client is not installed", hint=hint) from None
        chosen = {"kubeconfig": kubeconfig or None, "context": context or None, "namespace": namespace}
        with _translated("connect"):
            try:  # one of its own: kr8s would share one, and closing it would close it for others
                return Cluster(await Api(**chosen, bypass_factory=True), namespace)
            except (ValueError, FileNotFoundError) as error:
                raise FailedPrecondition(
                    f"there are no credentials for a Kubernetes cluster: {error}",
                    hint="name a file by `kubeconfig` in [backend.kubernetes] of config.toml",
                ) from None

    async def close(self) -> None:
        session = self._api._session
        if session is not None:
            await session.aclose()

    @property
    def server(self) -> tuple[str, int]:
        """Return host and port of the API server."""
        parts = urlsplit(str(self._api.auth.server))
        return parts.hostname or "", parts.port or 443

    async def versions(self, group: str) -> list[str]:
        """Return the versions in which a group is served; none if it is unknown."""
        try:
            found = await self._call("GET", base=f"/apis/{group}", version="")
        except NotFound:
            return []
        return [str(entry["version"]) for entry in found.get("versions", [])]

    async def get(self, kind: Kind, name: str) -> Object:
        return await self._call("GET", kind, name)

    async def list(self, kind: Kind, *, labels: str = "", fields: str = "") -> Object:
        """Return the whole list object, whose resourceVersion a watch can go on from."""
        return await self._call("GET", kind, params=_selectors(labels, fields))

    async def create(self, kind: Kind, value: Object) -> Object:
        return await self._call("POST", kind, content=json.dumps(value))

    async def patch(self, kind: Kind, name: str, value: Object) -> Object:
        """Merge `value` into an object. With `metadata.uid` in it another object is a Conflict."""
        headers = {"content-type": "application/merge-patch+json"}
        return await self._call("PATCH", kind, name, content=json.dumps(value), headers=headers)

    async def delete(self, kind: Kind, name: str, uid: str = "") -> bool:
        """Begin to delete an object, if it has this UID. Return whether it was there."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", kind, name, content=json.dumps(options))
        except (NotFound, Conflict):
            return False
        return True

    async def log(self, pod: str, container: str, limit: int) -> str:
        """Return the first bytes of a container's output."""
        params = {"container": container, "limitBytes": str(limit)}
        url = f"pods/{pod}/log"
        with _translated("read the log of", pod):
            async with self._open("GET", version=CORE, url=url, params=params) as response:
                return str(response.text)

    async def watch(self, kind: Kind, version: str, *, labels: str = "") -> AsyncIterator[Object]:
        """Yield events from `version` on, until the server ends the watch. Raise Gone if that is too old."""
        import httpx

        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
            **_selectors(labels, ""),
        }
        timeout = httpx.Timeout(CALL_TIMEOUT, read=WATCH_SECONDS + CALL_TIMEOUT)
        with _translated("watch", kind.plural):
            async with self._open(
                "GET", version=kind.version, url=kind.plural, params=params, stream=True, timeout=timeout
            ) as response:
                async for line in response.aiter_lines():
                    event: Object = json.loads(line)
                    if event["type"] == "ERROR":
                        raise Gone(str(event["object"].get("message", "the watch failed")))
                    yield event

    async def _call(self, method: str, kind: Kind | None = None, name: str = "", **fields: Any) -> Object:
        namespaced = True
        if kind is not None:
            fields["version"] = kind.version
            fields["url"] = f"{kind.plural}/{name}" if name else kind.plural
            namespaced = kind.namespaced
        else:
            namespaced = False
        what = f"{kind.plural} {name}".strip() if kind is not None else str(fields.get("base", ""))
        with _translated(method.lower(), what):
            async with self._open(method, namespaced=namespaced, **fields) as response:
                found: Object = response.json()
                return found

    @asynccontextmanager
    async def _open(self, method: str, *, namespaced: bool = True, **fields: Any) -> AsyncIterator[Any]:
        fields.setdefault("timeout", CALL_TIMEOUT)
        namespace = self.namespace if namespaced else None
        async with self._api.call_api(method, namespace=namespace, **fields) as response:
            yield response


class _translated:
    """Raise atoll's errors for those of kr8s and httpx."""

    def __init__(self, verb: str, what: str = "") -> None:
        self._doing = f"{verb} {what}".strip()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        import httpx
        import kr8s

        if isinstance(error, kr8s.ServerError) and error.response is not None:
            raise _refusal(error.response.status_code, str(error), self._doing) from None
        away = (httpx.HTTPError, kr8s.APITimeoutError, kr8s.ConnectionClosedError, OSError, kr8s.ServerError)
        if isinstance(error, away):
            reason = str(error) or type(error).__name__
            raise Unavailable(f"the Kubernetes API cannot be reached ({self._doing}): {reason}") from None
        if isinstance(error, ValueError | KeyError):
            raise Internal(f"the Kubernetes API answered something else ({self._doing}): {error}") from None


def _refusal(status: int, message: str, doing: str) -> AtollError:
    """Return atoll's error for an answer of the API server."""
    text = f"Kubernetes refused to {doing}: {message}"
    if status == 404:
        return NotFound(text)
    if status == 409:
        return AlreadyExists(text) if "already exists" in message else Conflict(text)
    if status == 410:
        return Gone(text)
    if status == 403 and "exceeded quota" in message:
        return Exhausted(text, hint="destroy a sandbox, or raise the quota of the namespace")
    if status in (401, 403):
        return FailedPrecondition(text, hint=RIGHTS)
    if status in (400, 422):
        return InvalidArgument(text)
    return Unavailable(text)


def _selectors(labels: str, fields: str) -> Mapping[str, str]:
    given = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in given.items() if value}
