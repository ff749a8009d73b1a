"""Principals of the control tests: an agent's key, and the key of somebody who may approve."""

from atoll.core.access.credentials import KeyHolder


def key(name: str, *scopes: str) -> KeyHolder:
    """A caller with a key of that name."""
    return KeyHolder(f"key:{name}", 65534, 65534, "key", name, name, scopes)


AGENT, BOSS = key("agent", "use"), key("boss", "approve")
