"""The host lists of `presets.toml`: defaults, the registry set, the modes, and the names that are never open."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from atoll.errors import InvalidArgument


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))


def default_hosts() -> tuple[str, ...]:
    """The allow list of a sandbox for which none was given."""
    return tuple(_data()["default"]["hosts"])


def registries() -> tuple[str, ...]:
    """The registry set: what package tools need by default, sorted and without repetition."""
    return tuple(sorted({host for hosts in _data()["registries"].values() for host in hosts}))


def run_hosts() -> tuple[str, ...]:
    """The allow list of `atoll run` with neither mode nor profile: registry set plus default list."""
    return tuple(sorted({*registries(), *default_hosts()}))


def mode_names() -> tuple[str, ...]:
    return tuple(_data()["modes"])


def mode(name: str) -> tuple[str, ...]:
    """The hosts of a compatibility mode, in the form `parse_hosts` reads."""
    entry = _data()["modes"].get(name)
    if entry is None:
        raise InvalidArgument(f"unknown mode {name!r}", hint="one of " + ", ".join(mode_names()))
    hosts: list[str] = list(entry["hosts"])
    if entry["registries"]:
        hosts += [host for host in registries() if host not in hosts]
    return tuple(hosts)


@cache
def git_hosts() -> frozenset[str]:
    """Hosts for which a listing opens port 22 as well."""
    return frozenset(_data()["git"]["hosts"])


@cache
def never_hosts() -> frozenset[str]:
    """Names that stay refused whatever a list says."""
    return frozenset(_data()["never"]["hosts"])


@cache
def not_public_suffixes() -> frozenset[str]:
    """Last labels which `*` does not cover."""
    return frozenset(_data()["not_public"]["suffixes"])
