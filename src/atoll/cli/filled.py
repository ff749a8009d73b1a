"""A tenant's own sandbox that is made of --manifest and --git-repo: one of many callers makes it."""

from __future__ import annotations

from .. import labels
from .session import find_own, shown, wake
from .workspaces import create_filled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..client._sync.driver import Link
    from .grammar import Arguments
    from .state import State


def obtain_filled(state: State, link: Link, options: dict[str, Any], filling: Arguments) -> str:
    """Return the tenant's sandbox, made and filled when there is none. Other callers here wait meanwhile."""
    with state.locked():
        session = state.current() or find_own(link, state)
        if session is None:
            options.setdefault("idle_timeout", labels.IDLE_S)
            if not options.get("persistent"):
                options["keep"] = True
                options.setdefault("lifetime", labels.LIFETIME_S)
            options["labels"] = labels.session_labels(state.tenant, state.holder)
            session = shown(create_filled(link, filling, options)[0]["id"])
        else:
            wake(link, session)
        state.write(session)
        return session
