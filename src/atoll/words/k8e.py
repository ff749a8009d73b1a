"""K8E's vocabulary: ids, phases, the tenant's label, exit codes and bounds.

The command line, gRPC, MCP and the SDKs all take these from here, so that one sandbox looks the
same through every door. Only the standard library's cheapest parts may be imported: the command
line's hot path reads this module.

A sandbox is `sess-<id>`, a sub-agent `sess-<parent>-sub-<id>`, a background run
`sess-<id>-bg-<command>`, a terminal `term-<id>-<command>`. Each is also understood without its
prefix; anything else is a name its owner chose.
"""

from __future__ import annotations

from ..labels import SESSION as SESSION_LABEL
from ..labels import TENANT as TENANT_LABEL
from ..labels import session_labels
from ..labels import tenant_of as tenant_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SESSION_LABEL", "TENANT_LABEL", "tenant_of"]

SESSION_PREFIX, TERMINAL_PREFIX = "sess-", "term-"
SUB_MARK, RUN_MARK = "-sub-", "-bg-"
ID_LENGTH = 20
_ID = frozenset("abcdefghijklmnopqrstuvwxyz234567")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_ALNUM = frozenset(_LETTERS)
_COMMAND = frozenset(_LETTERS + "_-")
_TENANT = frozenset(_LETTERS + "_.-")

# Phases, in the contract's words; what is being created already counts as active.
PHASES = {
    "creating": "Active",
    "running": "Active",
    "paused": "Paused",
    "stopping": "Paused",
    "stopped": "Paused",
    "ending": "Terminating",
    "ended": "Terminating",
}

OK, FAILED, UNREACHABLE, EXHAUSTED = 0, 1, 2, 8  # exit codes of `sandbox ...` verbs

MAX_ENV, MAX_ENV_KEY, MAX_ENV_VALUE, MAX_ENV_SUM = 64, 256, 4096, 32 * 1024
MAX_SECRETS = 32
TENANT_RULE = "1 to 63 letters, digits, `.`, `_` or `-`, starting with a letter or digit"


def phase_of(state: str | None) -> str:
    """Return the phase of a core state."""
    return PHASES.get(state or "", "Terminating")


def session_id(core_id: str, parent: str | None = None, labels: Mapping[str, str] | None = None) -> str:
    """Return what a sandbox is called here: the id its creator chose, else ours in K8E's form."""
    chosen = (labels or {}).get(SESSION_LABEL)
    if chosen:
        return chosen
    return f"{SESSION_PREFIX}{parent}{SUB_MARK}{core_id}" if parent else SESSION_PREFIX + core_id


def session_ref(text: str) -> str:
    """Return what core looks a session up by: the bare id, or a name as it is."""
    bare = text.removeprefix(SESSION_PREFIX)
    parent, mark, own = bare.rpartition(SUB_MARK)
    if mark and not _is_id(parent):
        return text
    return own if _is_id(own) else text


def run_id(core_id: str, command: str) -> str:
    return f"{SESSION_PREFIX}{core_id}{RUN_MARK}{command}"


def split_run_id(text: str) -> tuple[str, str] | None:
    """Return the sandbox's reference and the command's id, None when this is no run id.

    The sandbox may also stand there by the name its owner chose.
    """
    session, mark, command = text.rpartition(RUN_MARK)
    if not (mark and session and _is_command(command)):
        return None
    return session_ref(session), command


def terminal_id(core_id: str, command: str) -> str:
    return f"{TERMINAL_PREFIX}{core_id}-{command}"


def split_terminal_id(text: str) -> tuple[str, str] | None:
    bare = text.removeprefix(TERMINAL_PREFIX)
    core_id, dash, command = bare[:ID_LENGTH], bare[ID_LENGTH : ID_LENGTH + 1], bare[ID_LENGTH + 1 :]
    return (core_id, command) if _is_id(core_id) and dash == "-" and _is_command(command) else None


def is_tenant(text: str) -> bool:
    """Return whether this can be a tenant's name: it becomes a directory's name."""
    return 0 < len(text) < 64 and set(text) <= _TENANT and text[0] in _ALNUM and ".." not in text


def tenant_labels(tenant: str) -> dict[str, str]:
    """Return the labels of a new sandbox of this tenant."""
    return session_labels(tenant)


def _is_id(text: str) -> bool:
    return len(text) == ID_LENGTH and set(text) <= _ID


def _is_command(text: str) -> bool:
    return 0 < len(text) <= 64 and set(text) <= _COMMAND and text[0] in _ALNUM
