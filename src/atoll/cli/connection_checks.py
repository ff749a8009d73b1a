"""Checks of `sandbox doctor` beside the machine: program, profile, certificates, gateway and skill files."""

from __future__ import annotations

import os
import shutil

from ..client import calls
from ..errors import AtollError
from ..surfaces.k8e.cli.connect import install_skill
from .connection import Choice, choose, explain, open_chosen, read_settings
from .doctor_machine import check
from .session import data_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .doctor_machine import Check
    from .grammar import Arguments

NAMES = ("atoll", "k8e-sandbox-cli", "k8e-sandbox", "k8e")
SKILL, DSH = "skill files", "dsh skill"


def connection_checks(arguments: Arguments) -> tuple[list[Check], bool]:
    """The checks, and whether the daemon is the local one, so that this machine matters too."""
    found = next((path for path in map(shutil.which, NAMES) if path), "")
    fix = "atoll alias install k8e-sandbox-cli ~/.local/bin"
    checks = [check("program", bool(found), found or "not on PATH", fix, optional=True)]
    try:
        choice = choose(arguments)
    except AtollError as bad:
        checks.append(check("profile", False, explain(bad), "atoll sandbox connect"))
        return [*checks, *_skills()], False
    where = choice.endpoint or "the local daemon"
    checks.append(check("profile", True, f"{choice.profile or 'none'}: {where}"))
    checks.append(_certificates(choice))
    if not choice.is_local:
        checks.append(_gateway(arguments))
    return [*checks, *_skills()], choice.is_local


def repair(checks: list[Check], *, really: bool) -> int:
    """If really asked to, repair what can be repaired from here; how many were. A repair that fails is said and is a problem."""
    fixed = 0
    for one in checks:
        targets = one.pop("_repair", None)
        if targets is None or one["ok"] or not really:
            continue
        failed = [line for target in targets for line in install_skill(target)]
        one.pop("optional", None)
        if failed:
            one["detail"] = f"repair failed: {'; '.join(failed)}"
            continue
        one["ok"], one["detail"] = True, "repaired: " + ", ".join(targets)
        one.pop("fix", None)
        fixed += 1
    return fixed


def _certificates(choice: Choice) -> Check:
    def path(name: str) -> str:
        return os.path.join(choice.cert_dir, name)

    there = [name for name in ("ca.crt", "client.crt", "client.key", "endpoint") if os.path.exists(path(name))]
    if not there:
        return check("certificates", True, f"none in {choice.cert_dir}; none are needed locally")
    fix = "atoll sandbox connect --reset-certs"
    if there == ["ca.crt"]:
        return check("certificates", True, f"{path('ca.crt')}, no client certificate")
    if len(there) < 4:
        return check("certificates", False, f"only {', '.join(there)} in {choice.cert_dir}", fix)
    from ..client.route import days_left

    try:
        with open(path("client.crt"), "rb") as file:
            left = days_left(file.read())
        mode = os.stat(path("client.key")).st_mode & 0o077
    except OSError as failure:
        return check("certificates", False, f"{choice.cert_dir}: {failure.strerror}", fix)
    if mode:
        return check("certificates", False, "others may read client.key", f"chmod 600 {path('client.key')}")
    if left <= 0:
        return check("certificates", False, "the client certificate is not valid (any more)", fix)
    return check("certificates", True, f"valid for {left:.0f} days")


def _gateway(arguments: Arguments) -> Check:
    try:
        link = open_chosen(arguments, False)
        health = link.call(calls.get("/v1/health"))
        link.close()
    except AtollError as failure:
        return check("gateway", False, explain(failure), "atoll sandbox connect --endpoint host:port")
    return check("gateway", True, f"answers, atoll {health.get('version')}")


def _skills() -> list[Check]:
    """Missing skill files are a problem where `connect` put them once, otherwise a note."""
    from ..skill.targets import FALLBACK, present

    place = _place()
    try:
        agents = [name for name in read_settings().get("agents") or [] if isinstance(name, str)]
    except AtollError:
        agents = []
    usual = [name for name in agents or present(place) or FALLBACK if name != "dsh"]
    checks = [_skill(SKILL, usual, optional=not agents)]
    harness = os.environ.get("DSH_HOME") or os.path.join(os.path.expanduser("~"), ".dsh")
    if "dsh" in agents or os.path.isdir(harness):
        checks.append(_skill(DSH, ["dsh"], optional="dsh" not in agents))
    return checks


def _skill(name: str, targets: list[str], *, optional: bool) -> Check:
    from ..skill.targets import K8E, skill_directories

    directories = {folder: target for target in targets for folder in skill_directories(target, _place())}
    missing = {t: d for d, t in directories.items() if not os.path.isfile(os.path.join(d, K8E, "SKILL.md"))}
    staged = os.path.join(data_directory(), "skills", K8E, "SKILL.md")
    detail = f"missing in {', '.join(missing.values())}" if missing else "installed for " + ", ".join(targets)
    if not missing and not optional and not os.path.isfile(staged):
        missing, detail = {targets[0]: staged}, f"{staged} is missing"
    found = check(name, not missing, detail, "atoll sandbox doctor --fix", optional=optional)
    if missing:
        found["_repair"] = list(missing)
    return found


def _place() -> Any:
    from ..skill.targets import Place

    return Place(os.path.abspath(os.path.expanduser("~")), os.getcwd())
