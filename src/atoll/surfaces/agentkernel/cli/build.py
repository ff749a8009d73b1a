"""`run --build` and a project's `[build]`: the image of the project's own Dockerfile, named by its content.

A file that was only found in a directory can name nothing outside that directory.
"""

from __future__ import annotations

import os

from atoll.cli.image_builds import build_directory
from atoll.errors import InvalidArgument, PermissionDenied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from atoll.cli.grammar import Arguments

    from .project import Project


def build_project(arguments: Arguments, project: Project | None) -> str:
    """Build the Dockerfile here, or as `[build]` says; return the image's digest."""
    here = project.directory if project is not None and project.data.get("build") else os.getcwd()

    def setting(key: str) -> object:
        return project.get("build", key) if project is not None else None

    context = _inside(here, str(setting("context") or "."), "context")
    file = setting("dockerfile")
    args = setting("args") or {}
    if not isinstance(args, dict) or not all(isinstance(value, str) for value in args.values()):
        raise InvalidArgument("[build.args] needs texts", hint='such as VERSION = "3.12"')
    image = build_directory(
        arguments, context, _inside(here, str(file), "dockerfile") if file else None,
        args=args, target=str(setting("target") or ""), no_cache=bool(setting("no_cache")),
    )  # fmt: skip
    return str(image["digest"])


def _inside(here: str, path: str, what: str) -> str:
    top, found = os.path.realpath(here), os.path.realpath(os.path.join(here, path))
    if os.path.commonpath((top, found)) != top:
        raise PermissionDenied(f"[build] {what} lies outside the project: {path!r:.200}")
    return found
