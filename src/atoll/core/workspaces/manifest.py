"""Manifests: a new sandbox with files, directories and git repositories in its /workspace.

The whole text is read and checked before anything is made. Then each entry is done inside the sandbox, by its agent or by
its own git; the first that fails takes the sandbox along, and the error names it.
"""

import re
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.model import CreateFromManifest, EntryBegun, ExecSpec, SandboxInfo
from atoll.model.files import MakeDirectory

if TYPE_CHECKING:
    from atoll.core import Core

MAX_ENTRIES = 1000
MAX_TEXT = 32 << 20
MAX_EVENTS = 20 * MAX_ENTRIES  # an entry with all its fields has twelve
MAX_DEPTH = 6  # mapping, list, entry, its fields, and two to be told what is wrong
CLONE_TIMEOUT = 120.0
REPO = re.compile(r"(https?://[A-Za-z0-9\[]|git@[A-Za-z0-9])[^\s\x00-\x1f\x7f]{0,2000}")
REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
MODE = re.compile(r"(0o)?[0-7]{1,4}")
FIELDS = {"file": ({"path", "content"}, {"mode"}), "dir": ({"path"}, set()), "gitRepo": ({"path", "repo"}, {"ref"})}

Item = EntryBegun | SandboxInfo


class Step(NamedTuple):
    kind: str
    path: str
    content: bytes = b""
    mode: int | None = None
    repo: str = ""
    ref: str = "main"


class Manifests(Part):
    def __init__(self, core: "Core") -> None:
        self._core = core

    @verb("manifests.create")
    async def create(self, who: Principal, request: CreateFromManifest) -> AsyncIterator[Item]:
        """Tells each entry as it is begun, and at last the sandbox."""
        steps = await self._core.workers.run(who.owner, parse, request.manifest) if request.manifest else []
        steps += [_step(n, len(request.entries), entry) for n, entry in enumerate(request.entries, 1)]
        info = await self._core.sandboxes.create(who, request.sandbox)
        try:
            for number, step in enumerate(steps, 1):
                yield {"entry": number, "of": len(steps), "does": f"{step.kind} {step.path}"}
                try:
                    await self._do(who, info.id, step)
                except errors.AtollError as error:
                    text = f"entry {number}/{len(steps)} ({step.kind} {step.path!r:.120}): {error.message}"
                    raise type(error)(text, hint=error.hint, details=error.details) from None
        except BaseException:
            await self._core.sandboxes.destroy(who, info.id)
            raise
        yield await self._core.sandboxes.get(who, info.id)

    async def _do(self, who: Principal, sandbox: str, step: Step) -> None:
        path = f"/workspace/{step.path}"
        if step.kind == "file":
            await self._core.files.write(who, sandbox, path, step.content, mode=step.mode, parents=True)
        elif step.kind == "dir":
            wanted = MakeDirectory(path=path, parents=True, exist_ok=True)
            await self._core.files.ask(who, sandbox, "mkdir", wanted)
        else:
            await self._clone(who, sandbox, step, path)

    async def _clone(self, who: Principal, sandbox: str, step: Step, path: str) -> None:
        argv = ["git", "clone", "--quiet", "--depth", "1", "-b", step.ref, "--", step.repo, path]
        spec = ExecSpec(argv=argv, env={"GIT_TERMINAL_PROMPT": "0"}, timeout_ms=int(CLONE_TIMEOUT * 1000))
        done = await self._core.commands.exec(who, sandbox, spec)
        if done.timed_out:
            raise errors.Timeout(f"git clone took more than {CLONE_TIMEOUT:g} s")
        if done.exit_code != 0:
            refused = "; ".join(str(item.get("note")) for item in done.blocked[:2])
            said = done.stderr.strip()[-600:] + (f" ({refused})" if refused else "")
            raise errors.FailedPrecondition(f"git clone failed with exit code {done.exit_code}: {said}")


def parse(text: str) -> list[Step]:
    """The steps of a manifest. Every scalar is read as text, so `mode: 0755` and `content: 1` are what they look like."""
    import yaml

    if len(text) > MAX_TEXT or len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT:
        raise errors.TooLarge(f"a manifest has at most {MAX_TEXT >> 20} MiB")
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        _count(yaml.parse(text, Loader=loader))
        found = yaml.load(text, Loader=loader)  # the base loader makes nothing but text, lists and mappings
    except (yaml.YAMLError, RecursionError, ValueError) as bad:
        raise errors.InvalidArgument(f"the manifest is not YAML: {str(bad)[:300]}") from None
    if not isinstance(found, dict) or set(found) != {"entries"} or not isinstance(found["entries"], list):
        raise errors.InvalidArgument("a manifest has one key, `entries`, with a list")
    entries = found["entries"]
    if len(entries) > MAX_ENTRIES:
        raise errors.TooLarge(f"a manifest has at most {MAX_ENTRIES} entries")
    return [_step(number, len(entries), entry) for number, entry in enumerate(entries, 1)]


def _count(events: Iterable[Any]) -> None:
    """Refuse what would become large or deep before anything is made of it. Stops at the first event too many."""
    depth = 0
    for number, event in enumerate(events):
        kind = type(event).__name__
        if kind == "AliasEvent" or getattr(event, "anchor", None):
            raise errors.InvalidArgument("a manifest has no anchors and aliases")
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        if depth > MAX_DEPTH:
            raise errors.InvalidArgument(f"a manifest is not nested more than {MAX_DEPTH} deep")
        if number > MAX_EVENTS:
            raise errors.TooLarge(f"a manifest has at most {MAX_ENTRIES} entries, and nothing else")


def _step(number: int, count: int, entry: Any) -> Step:
    try:
        return _checked(entry)
    except errors.InvalidArgument as bad:
        raise errors.InvalidArgument(f"entry {number}/{count}: {bad.message}") from None


def _checked(entry: Any) -> Step:
    if not isinstance(entry, dict) or len(entry) != 1:
        raise errors.InvalidArgument("an entry is one of `file`, `dir` and `gitRepo`")
    ((kind, fields),) = entry.items()
    if kind not in FIELDS or not isinstance(fields, dict):
        raise errors.InvalidArgument(f"{kind!r:.40} is no kind of entry", hint="file, dir or gitRepo")
    needed, optional = FIELDS[kind]
    if missing := sorted(needed - set(fields)):
        raise errors.InvalidArgument(f"{kind} needs `{missing[0]}`")
    if unknown := sorted(map(str, set(fields) - needed - optional)):
        raise errors.InvalidArgument(f"{kind} has no field `{unknown[0]:.40}`")
    if not all(isinstance(value, str) for value in fields.values()):
        raise errors.InvalidArgument(f"the fields of {kind} are text")
    path = _path(fields["path"])
    if kind == "file":
        return Step(kind, path, fields["content"].encode("utf-8", "surrogateescape"), _mode(fields.get("mode")))
    if kind == "dir":
        return Step(kind, path)
    if not REPO.fullmatch(fields["repo"]):
        raise errors.InvalidArgument(f"{fields['repo']!r:.120} is not an http(s) or git@ repository")
    ref = fields.get("ref") or "main"
    if not REF.fullmatch(ref) or ".." in ref:
        raise errors.InvalidArgument(f"{ref!r:.80} is not the name of a branch or tag")
    return Step(kind, path, repo=fields["repo"], ref=ref)


def _path(path: str) -> str:
    parts = path.rstrip("/").split("/")
    if not path or "\0" in path or len(path.encode("utf-8", "replace")) > 1024:
        raise errors.InvalidArgument("a path is 1 to 1024 bytes without NUL")
    if any(part in ("", ".", "..") or len(part) > 255 for part in parts):
        raise errors.InvalidArgument(f"{path!r:.120} is not a plain path below /workspace")
    return "/".join(parts)


def _mode(text: str | None) -> int | None:
    if not text:
        return None
    if not MODE.fullmatch(text):
        raise errors.InvalidArgument(f"mode {text!r:.20} is not octal, like 0755")
    return int(text.removeprefix("0o"), 8)
