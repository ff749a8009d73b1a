"""Installing and removing a skill: each step says what it does to which file, and a failed one touches nothing.

Files are replaced as a whole (a new one beside it, then a rename), so that nobody sees half of one. Skill files carry a
checksum in their last line: one that was changed by hand is left alone unless forced.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from . import jsonc, toml
from .jsonc import BadSettings
from .targets import AGENTKERNEL, K8E, Entry, Place, entries, server, skill_directories

CREATED, MERGED, SKIPPED, FAILED, REMOVED = "+", "~", "-", "!", "x"
MAX_SETTINGS = 16 * 1024 * 1024
OLD_FOLDER = "k8e-sandbox-skill"

ALLOW = {
    AGENTKERNEL: (
        "sandbox_run",
        "sandbox_exec",
        "sandbox_list",
        "sandbox_file_read",
        "sandbox_start",
        "sandbox_stop",
    ),
    K8E: (
        "sandbox_run",
        "sandbox_exec",
        "sandbox_exec_stream",
        "sandbox_status",
        "sandbox_read_file",
        "sandbox_list_files",
    ),
}
ASK = {
    AGENTKERNEL: ("sandbox_create", "sandbox_file_write", "sandbox_remove"),
    K8E: (
        "sandbox_create_session", "sandbox_destroy_session", "sandbox_write_file", "sandbox_pip_install",
        "sandbox_run_subagent", "sandbox_confirm_action",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A change made, or planned, to a file."""

    mark: str
    path: str
    note: str = ""


class Installer:
    """Does the steps of a target, or only says them."""

    def __init__(self, skill: str, place: Place, *, dry: bool = False, force: bool = False) -> None:
        self.skill = skill
        self.place = place
        self.dry = dry
        self.force = force
        self.steps: list[Step] = []
        self._done: set[str] = set()

    def install(self, target: str, *, permissions: bool = False) -> None:
        for directory in skill_directories(target, self.place):
            self._try(os.path.join(directory, self.skill, "SKILL.md"), self._write_skill, skill_text(self.skill))
            self._remove_old(directory)
        if self.skill == AGENTKERNEL and target == "claude":
            path = os.path.join(self._root(), ".claude", "commands", "sandbox.md")
            self._try(path, self._write_skill, sealed(_resource("sandbox-command.md")))
        if self.skill == AGENTKERNEL and target == "opencode":
            self._opencode()
        for entry in entries(target, self.place, self.skill):
            self._try(entry.path, self._merge, lambda text, entry=entry: _add_entry(text, entry, self.skill))
        if permissions and target == "claude":
            path = os.path.join(self._root(), ".claude", "settings.json")
            self._try(path, self._merge, lambda text: _add_permissions(text, self.skill), again="permissions")

    def uninstall(self, target: str, *, permissions: bool = True) -> None:
        for directory in skill_directories(target, self.place):
            self._try(os.path.join(directory, self.skill, "SKILL.md"), self._remove_skill, None)
        if self.skill == AGENTKERNEL and target == "claude":
            self._try(os.path.join(self._root(), ".claude", "commands", "sandbox.md"), self._remove_skill, None)
        if self.skill == AGENTKERNEL and target == "opencode":
            self._try(self._opencode_path(), self._remove_skill, None)
        for entry in entries(target, self.place, self.skill):
            self._try(entry.path, self._unmerge, lambda text, entry=entry: _remove_entry(text, entry, self.skill))
        if target == "claude":
            path = os.path.join(self._root(), ".claude", "settings.json")
            self._try(path, self._unmerge, lambda text: _remove_permissions(text, self.skill), again="permissions")

    @property
    def failed(self) -> bool:
        return any(step.mark == FAILED for step in self.steps)

    # Steps

    def _try(self, path: str, step: Callable[[str, Any], Step], what: Any, again: str = "") -> None:
        """One step, once for each file however many targets share it."""
        if path + again in self._done:
            return
        self._done.add(path + again)
        try:
            self.steps.append(step(path, what))
        except BadSettings as bad:
            self.steps.append(Step(FAILED, path, f"left as it is: {bad}"))
        except (OSError, UnicodeError) as failure:
            self.steps.append(Step(FAILED, path, str(getattr(failure, "strerror", None) or failure)))

    def _write_skill(self, path: str, text: str) -> Step:
        there = self._ours(path)
        if there == text:
            return Step(SKIPPED, path, "up to date")
        if there is not None and not is_sealed(there) and not self.force:
            return Step(SKIPPED, path, "changed by hand; --force replaces it")
        self._replace(path, text)
        return Step(CREATED if there is None else MERGED, path)

    def _remove_skill(self, path: str, _: None) -> Step:
        there = self._ours(path)
        if there is None:
            return Step(SKIPPED, path, "not there")
        if not is_sealed(there) and not self.force:
            return Step(SKIPPED, path, "changed by hand; --force removes it")
        if not self.dry:
            os.unlink(path)
            _remove_empty(os.path.dirname(path), self.skill)
        return Step(REMOVED, path)

    def _merge(self, path: str, change: Callable[[str], str]) -> Step:
        there = self._settings(path)
        made = change(there or "")
        if made == there:
            return Step(SKIPPED, path, "up to date")
        self._replace(self._real(path), made)
        return Step(CREATED if there is None else MERGED, path)

    def _unmerge(self, path: str, change: Callable[[str], str]) -> Step:
        there = self._settings(path)
        if there is None:
            return Step(SKIPPED, path, "not there")
        made = change(there)
        if made == there:
            return Step(SKIPPED, path, "nothing of ours in it")
        self._replace(self._real(path), made)
        return Step(MERGED, path)

    def _opencode_path(self) -> str:
        folder = (".config", "opencode") if self.place.only == "home" else (".opencode",)
        return os.path.join(self._root(), *folder, "plugins", "agentkernel.ts")

    def _opencode(self) -> None:
        path = self._opencode_path()
        self._try(path, self._write_skill, sealed(_resource("opencode.ts"), "// atoll {} //"))
        package = os.path.join(os.path.dirname(os.path.dirname(path)), "package.json")
        self._try(
            package,
            self._merge,
            lambda text: (
                text
                if (jsonc.parse(text).member("dependencies") or jsonc.Node({}, 0, 0)).member("@opencode-ai/plugin")
                else jsonc.put(text, ["dependencies", "@opencode-ai/plugin"], "*")
            ),
        )

    def _remove_old(self, directory: str) -> None:
        """The folder an older installer used, when there is nothing in it but its own file."""
        folder = os.path.join(directory, OLD_FOLDER)
        if (
            self.skill != K8E
            or os.path.islink(folder)
            or not os.path.isdir(folder)
            or os.listdir(folder) != ["SKILL.md"]
        ):
            return
        if not self.dry:
            os.unlink(os.path.join(folder, "SKILL.md"))
            os.rmdir(folder)
        self.steps.append(Step(REMOVED, folder, "of an older version"))

    # Files

    def _root(self) -> str:
        """Where things go that exist once: the home directory, unless it is about the project."""
        return self.place.project if self.place.only == "project" else self.place.home

    def _ours(self, path: str) -> str | None:
        """A skill file's text; a link in its place is somebody else's and is not followed."""
        if os.path.islink(path):
            raise BadSettings("a link is in its place")
        return _read(path)

    def _settings(self, path: str) -> str | None:
        real = self._real(path)
        if not os.path.lexists(real):
            return None
        return _read(real)

    def _real(self, path: str) -> str:
        """A user's settings may be a link; a project's may not lead out of the project."""
        real, project = os.path.realpath(path), os.path.realpath(self.place.project)
        inside = os.path.commonpath((os.path.abspath(path), self.place.project)) == self.place.project
        below_home = os.path.commonpath((os.path.abspath(path), self.place.home)) == self.place.home
        deeper = len(self.place.project) > len(self.place.home) or not below_home
        if inside and deeper and os.path.commonpath((real, project)) != project:
            raise BadSettings("it is a link that leads out of the project")
        return real

    def _replace(self, path: str, text: str) -> None:
        if self.dry:
            return
        directory = os.path.dirname(path)
        os.makedirs(directory, exist_ok=True)
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode)
        except FileNotFoundError:
            mode = 0o644
        descriptor, name = tempfile.mkstemp(prefix=".atoll-", dir=directory)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, mode)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def skill_text(skill: str) -> str:
    return sealed(_resource(f"{skill}.md"))


def sealed(text: str, form: str = "<!-- atoll {} -->") -> str:
    """The text with its checksum behind it."""
    return f"{text.rstrip()}\n\n{form.format(_sum(text))}\n"


def is_sealed(text: str) -> bool:
    """Whether this is a text of ours, of any version, that nobody has changed."""
    found = re.search(r"\n(?:<!--|//) atoll ([0-9a-f]{16}) (?:-->|//)\n\Z", text)
    return found is not None and found[1] == _sum(text[: found.start()])


def _sum(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_SETTINGS + 1)
    except FileNotFoundError:
        return None
    if len(raw) > MAX_SETTINGS:
        raise BadSettings(f"larger than {MAX_SETTINGS} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise BadSettings("it is not UTF-8 text") from None


def _remove_empty(directory: str, name: str) -> None:
    if os.path.basename(directory) == name and not os.listdir(directory):
        os.rmdir(directory)


def _add_entry(text: str, entry: Entry, skill: str) -> str:
    value = server(skill, entry.remote)
    if entry.form == "toml":
        return toml.put(text, entry.keys[0], skill, {key: item for key, item in value.items() if item != {}})
    if entry.form == "opencode":
        value = _opencode_value(value)
    if text.strip():
        there: jsonc.Node | None = jsonc.parse(text)
        for key in (*entry.keys, skill):
            there = there.member(key) if there is not None else None
        if there is not None and there.value == value:
            return text
    return jsonc.put(text, [*entry.keys, skill], value)


def _opencode_value(value: dict[str, object]) -> dict[str, object]:
    if "url" in value:
        return {"type": "remote", "url": value["url"], "enabled": True}
    args = value["args"]
    assert isinstance(args, list)
    return {"type": "local", "command": [value["command"], *args], "enabled": True}


def _remove_entry(text: str, entry: Entry, skill: str) -> str:
    if entry.form == "toml":
        return toml.take_out(text, entry.keys[0], skill)
    return jsonc.take_out(text, [*entry.keys, skill])


def _lists(skill: str) -> dict[str, list[str]]:
    return {
        "allow": [f"mcp__{skill}__{name}" for name in ALLOW[skill]],
        "ask": [f"mcp__{skill}__{name}" for name in ASK[skill]],
    }


def _add_permissions(text: str, skill: str) -> str:
    """Our tools in the allow and ask lists. One that the user denies or has listed elsewhere stays where it is."""
    node = jsonc.parse(text).value if text.strip() else {}
    known = node.get("permissions", {}) if isinstance(node, dict) else {}
    placed = {rule for rules in known.values() if isinstance(rules, list) for rule in rules if isinstance(rule, str)}
    for name, rules in _lists(skill).items():
        missing = [rule for rule in rules if rule not in placed]
        if missing:
            text = jsonc.extend(text, ["permissions", name], missing)
    return text


def _remove_permissions(text: str, skill: str) -> str:
    for name, rules in _lists(skill).items():
        text = jsonc.drop(text, ["permissions", name], rules)
    return text


def as_json(steps: list[Step]) -> str:
    return json.dumps([{"mark": step.mark, "path": step.path, "note": step.note} for step in steps])
