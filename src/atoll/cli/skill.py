"""`skill install|uninstall|list`, `plugin install` and `sandbox-install-skill`: atoll made known to coding agents."""

from __future__ import annotations

import os

from ..errors import InvalidArgument
from .grammar import UsageError
from .output import print_json, say, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..skill.targets import Place
    from .grammar import Arguments


IN_PROJECT = ("kiro",)  # agents whose contract puts a skill into a project that has their folder


def install(arguments: Arguments) -> int:
    from ..skill.targets import K8E, SKILLS

    skill = arguments.skill or K8E
    if skill not in SKILLS:
        raise UsageError(f"no skill {skill!r}", "one of " + ", ".join(SKILLS))
    return _do(arguments, skill, "auto", _only(arguments), at_home=True)


def install_k8e(arguments: Arguments) -> int:
    from ..skill.targets import K8E

    return _do(arguments, K8E, "all", _only(arguments))


def install_plugin(arguments: Arguments) -> int:
    """agentkernel's form: in the project unless --global."""
    from ..skill.targets import AGENTKERNEL

    return _do(arguments, AGENTKERNEL, "claude", _only(arguments) or "project")


def uninstall(arguments: Arguments) -> int:
    arguments.values["uninstall"] = True
    return install(arguments)


def list_all(arguments: Arguments) -> int:
    """List the installed skills, as found on disk."""
    from ..skill.targets import SKILLS, TARGETS, entries, skill_directories

    found = []
    for skill in SKILLS:
        for target in TARGETS:
            for only in (None, "project"):
                place = _place(only)
                for directory in skill_directories(target, place):
                    path = os.path.join(directory, skill, "SKILL.md")
                    if os.path.isfile(path):
                        found.append((skill, target, "skill", path))
                for entry in entries(target, place, skill):
                    if _names(entry.path, skill):
                        found.append((skill, target, "mcp", entry.path))
    found = list(dict.fromkeys(found))
    if arguments.json:
        print_json({"installed": [dict(zip(("skill", "target", "kind", "path"), one, strict=True)) for one in found]})
        return 0
    for skill, target, kind, path in found:
        tell(f"{skill:12} {target:15} {kind:6} {path}")
    if not found:
        say("no skill is installed; see: atoll skill install")
    return 0


def _names(path: str, skill: str) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(16 * 1024 * 1024)
    except OSError:
        return False
    return f'"{skill}"' in text or f".{skill}]" in text


def _do(arguments: Arguments, skill: str, default: str, only: str | None, at_home: bool = False) -> int:
    """`at_home`: nothing is written into the project unless that was asked for, or the agent's contract says so."""
    from ..skill.install import Installer
    from ..skill.targets import chosen

    place = _place(only)
    word = arguments.rest[0] if arguments.rest else None
    try:
        targets = chosen(word, default, place)
    except ValueError as bad:
        raise InvalidArgument(str(bad)) from None
    installer = Installer(skill, place, dry=bool(arguments.dry_run), force=bool(arguments.force))
    tell(place.project if only == "project" else place.home)
    for target in targets:
        if at_home and only is None:
            installer.place = _place(None if target in IN_PROJECT else "home")
        if arguments.uninstall:
            installer.uninstall(target)
        else:
            installer.install(target, permissions=bool(arguments.permissions))
    for step in installer.steps:
        tell(f"{step.mark} {step.path}" + (f" ({step.note})" if step.note else ""))
    if arguments.dry_run:
        say("nothing was changed")
    return 1 if installer.failed else 0


def _only(arguments: Arguments) -> str | None:
    on_both = getattr(arguments, "global") and arguments.project
    if on_both:
        raise UsageError("either --global or --project")
    return "home" if getattr(arguments, "global") else "project" if arguments.project else None


def _place(only: str | None) -> Place:
    from ..skill.targets import Place

    return Place(os.path.abspath(os.path.expanduser("~")), os.getcwd(), only)
