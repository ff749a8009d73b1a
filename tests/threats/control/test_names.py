"""CTL-08: no name of a snapshot, secret or approval is ever a path."""

from pathlib import Path

import pytest

from atoll import errors
from atoll.core import Core
from atoll.core.access.principals import local
from atoll.core.workspaces.index import Entry, Shelf, check_name
from atoll.model import SaveSnapshot

ME = local(0, 0)
HOSTILE = ["", ".", "..", "../../x", "a/b", "/etc/passwd", "a\\b", "a\0b", "a b", "-a", ".hidden", "a..b", "CON", "nul.txt", "x" * 64,
           "x" * 300, "caf\u00e9", "a\n", "\u202ea", "%2e%2e", "~root", "a:b"]  # fmt: skip


def tree(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_are_refused_everywhere(core: Core, name: str) -> None:
    before = tree(core.home)
    with pytest.raises(errors.InvalidArgument):
        check_name(name)
    for refused in (
        core.snapshots.delete(ME, name),
        core.snapshots.restore(ME, name),
        core.snapshots.inspect(ME, name),
        core.snapshots.get_manifest(ME, name),
        core.snapshots.put_manifest(ME, name, ["0" * 64]),
        core.snapshots.save(ME, "none", SaveSnapshot(name=name)),
    ):
        with pytest.raises(errors.InvalidArgument):
            await refused
    made = {path for path in tree(core.home) - before if not path.startswith(("atoll.db", "audit"))}
    assert made <= {"snapshots", "snapshots/list", "snapshots/chunks", "snapshots/staging", "snapshots/snapshot.key"}


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in ("a..b", "CON", "nul.txt")])
async def test_hostile_names_of_secrets_are_refused(core: Core, name: str) -> None:
    for pair in ((name, "key"), ("name", name)):
        with pytest.raises(errors.InvalidArgument):
            await core.secrets.set(ME, *pair, "value")
    assert await core.secrets.list(ME) == {}


def test_files_on_disk_have_names_of_our_own(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "list")
    head = {"owner": "uid:0", "name": "ok.name-1", "full": False}
    shelf.save(head, [Entry(b"a", "f", 0o644, 0, 0, 0.0, 0)])
    (made,) = (tmp_path / "list").iterdir()
    assert len(made.stem) == 32 and set(made.stem) <= set("0123456789abcdef")
    with pytest.raises(errors.NotFound):
        shelf.head("uid:1", "ok.name-1")
