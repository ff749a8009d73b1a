"""From a command line to a sandbox: which daemon, which tenant, which sandbox, and the ids K8E shows."""

from __future__ import annotations

import os
import sys

from ..client._sync.driver import Link
from ..client.spawn import home_directory
from ..errors import InvalidArgument, NotFound
from ..words import k8e as words
from ..words.k8e import run_id as run_id
from ..words.k8e import session_id as shown
from ..words.k8e import session_ref as reference
from .output import say

__all__ = ["reference", "run_id", "shown"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..client.options import CreateOptions
    from ..client.wire import SandboxWire
    from .grammar import Arguments
    from .state import State


def setting(name: str) -> str | None:
    """A variable of the environment: atoll's own name wins over K8E's."""
    return os.environ.get("ATOLL_" + name) or os.environ.get("K8E_SANDBOX_" + name) or None


def open_link(arguments: Arguments, *, start: bool = True) -> Link:
    """The daemon or gateway this command line is for."""
    if not _is_configured(arguments):
        if start and os.isatty(2) and not os.path.exists(os.path.join(home_directory(), "probes.json")):
            say("atoll: first use here: finding out what works and preparing the image, which takes some seconds ...")
        return Link(start=start)
    from .connection import open_chosen

    return open_chosen(arguments, start)


def _is_configured(arguments: Arguments) -> bool:
    """Whether anything says that the local daemon is not simply meant."""
    values = arguments.values
    if values.get("endpoint") or values.get("apikey") or values.get("context"):
        return True
    if any(setting(name) for name in ("ENDPOINT", "APIKEY", "CONTEXT", "PROFILE", "CONFIG")):
        return True
    data = data_directory()
    exists = os.path.exists
    if exists(data + "/profiles.yaml") or exists(data + "/config.json"):
        return True
    return is_k8e() and exists(os.path.join(os.path.expanduser("~"), ".k8e", "config.yaml"))


def endpoint_of(arguments: Arguments) -> str:
    """Return the address of the gateway this command line is for; empty for the local daemon."""
    if not _is_configured(arguments):
        return ""
    from .connection import choose

    return choose(arguments).endpoint


def state_of(arguments: Arguments, tenant: str) -> State:
    """Return the file that remembers this tenant's automatic sandbox there."""
    from .state import State

    return State(data_directory(), tenant, endpoint_of(arguments))


def is_k8e() -> bool:
    """Whether this program was called by K8E's name."""
    return os.path.basename(sys.argv[0]) in ("k8e", "k8e-sandbox", "k8e-sandbox-cli")


_kept: list[str] = []


def keep_data_directory() -> None:
    """Certificates of a profile may lie elsewhere; the rest stays where it is now."""
    _kept[:] = [data_directory()]


def data_directory() -> str:
    """Where K8E's files live: below ATOLL_HOME, or at K8E's own place when called by its name."""
    if _kept:
        return _kept[0]
    own = os.environ.get("ATOLL_CERT_DIR")
    if own:
        return own
    called_k8e = is_k8e()
    if os.environ.get("ATOLL_HOME"):  # it moves all state, under every name
        return os.path.join(os.path.abspath(os.environ["ATOLL_HOME"]), "sandbox")
    other = os.environ.get("K8E_SANDBOX_CERT_DIR")
    if other:
        return other
    return os.path.join(os.path.expanduser("~"), ".k8e" if called_k8e else ".atoll", "sandbox")


def tenant_of(arguments: Arguments) -> str:
    """The tenant's name, checked: it becomes a directory's name."""
    tenant = arguments.tenant or setting("TENANT") or "default"
    if not words.is_tenant(tenant):
        raise InvalidArgument(f"{tenant!r} is not a tenant's name", hint=words.TENANT_RULE)
    return str(tenant)


def find_own(link: Link, state: State) -> str | None:
    """Return the tenant's own sandbox as the daemon knows it; None: there is none."""
    from ..client import calls

    found = link.call(calls.find_session(state.tenant, state.holder))["sandbox"]
    return None if found is None else shown(found["id"])


def tell_unheld(made: SandboxWire) -> None:
    """Default limits of a new sandbox that this host cannot hold."""
    if unheld := [name for name, limit in (made.get("limits") or {}).items() if limit.get("enforced") is False]:
        from .unheld import note_unheld

        note_unheld(unheld)


def wake(link: Link, session: str) -> bool:
    """Start a sandbox that was stopped, as one that keeps its workspace is when nobody uses it; whether that was it."""
    from ..client import calls

    try:
        if link.call(calls.info(reference(session)))["state"] != "stopped":
            return False
        link.call(calls.lifecycle(reference(session), "start"))
    except NotFound:
        return False
    return True


def split_run_id(text: str) -> tuple[str, str]:
    found = words.split_run_id(text)
    if found is None:
        raise InvalidArgument(f"{text!r} is not a run id", hint="run --background prints one")
    return found


def create_options(arguments: Arguments) -> CreateOptions:
    """The flags that `create` and `run` share, as options of the SDK's create."""
    hosts = arguments.allowed_hosts
    options: Mapping[str, object] = {
        "runtime": arguments.runtime,
        "image": arguments.image,
        "cpus": arguments.cpus,
        "memory_mb": arguments.memory,
        "pids": arguments.pids,
        "files": arguments.files,
        "disk_mb": arguments.disk,
        "shm_mb": arguments.shm,
        "lifetime": arguments.lifetime,
        "idle_timeout": arguments.idle_timeout,
        "profile": arguments.profile,
        "hosts": [] if hosts == ["none"] else hosts,
        "more_hosts": arguments.allow_host or None,
        "network": False if arguments.no_network else None,
        "host_ports": arguments.host_access or None,
    }
    return {key: value for key, value in options.items() if value is not None}  # type: ignore[return-value]
