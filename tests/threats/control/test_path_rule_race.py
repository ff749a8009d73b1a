"""F2-M5: what a `path:` rule judged is what changes, whatever becomes of the path in between."""

import io
import tarfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from lab.approvals import held
from lab.principals import AGENT

from atoll import errors
from atoll.core import Core
from atoll.core.access.approval_rules import Gate
from atoll.model import CreateSandbox, convert
from atoll.model.files import ChangeMode, CopyFile, MakeDirectory, MakeLink, MoveFile, RemoveFile, Sed

Work = Coroutine[Any, Any, Any]


def archive() -> bytes:
    """Return an archive with the one file `planted`."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("planted"), io.BytesIO())
    return made.getvalue()


def work(core: Core, box: str, op: str, here: str) -> Work:
    """One change of something below `here`, for which no rule is meant."""
    files = core.files
    ways: dict[str, Any] = {
        "write": lambda: files.write(AGENT, box, f"{here}/file", b"planted"),
        "write in place": lambda: files.write(AGENT, box, f"{here}/file", b"planted", atomic=False),
        "append": lambda: files.write(AGENT, box, f"{here}/file", b"planted", append=True),
        "write below": lambda: files.write(AGENT, box, f"{here}/new/file", b"planted", parents=True),
        "tar_in": lambda: files.tar_in(AGENT, box, here, archive()),
        "mkdir": lambda: files.ask(AGENT, box, "mkdir", MakeDirectory(path=f"{here}/planted")),
        "mkdir -p": lambda: files.ask(AGENT, box, "mkdir", MakeDirectory(path=f"{here}/planted/deep", parents=True)),
        "symlink": lambda: files.ask(AGENT, box, "symlink", MakeLink(path=f"{here}/planted", target="x")),
        "remove": lambda: files.ask(AGENT, box, "remove", RemoveFile(path=f"{here}/file")),
        "remove -r": lambda: files.ask(AGENT, box, "remove", RemoveFile(path=f"{here}/tree", recursive=True)),
        "move from": lambda: files.ask(AGENT, box, "move", MoveFile(src=f"{here}/file", dst=f"{here}/../moved")),
        "move to": lambda: files.ask(AGENT, box, "move", MoveFile(src=f"{here}/../spare", dst=f"{here}/planted")),
        "copy": lambda: files.ask(AGENT, box, "copy", CopyFile(src=f"{here}/../spare", dst=f"{here}/planted")),
        "chmod": lambda: files.ask(AGENT, box, "chmod", ChangeMode(path=f"{here}/file", mode=0o777)),
        "chmod -R": lambda: files.ask(AGENT, box, "chmod", ChangeMode(path=here, mode=0o777, recursive=True)),
        "sed": lambda: files.ask(AGENT, box, "sed", Sed(pattern="old", replacement="planted", path=here)),
        "sed file": lambda: files.ask(AGENT, box, "sed", Sed(pattern="o", replacement="p", path=f"{here}/file")),
        "sed files": lambda: files.ask(AGENT, box, "sed", Sed(pattern="o", replacement="p", files=[f"{here}/file"])),
    }
    made: Work = ways[op]()
    return made


OPS = ("write", "write in place", "append", "write below", "tar_in", "mkdir", "mkdir -p", "symlink", "remove", "remove -r",
       "move from", "move to", "copy", "chmod", "chmod -R", "sed", "sed file", "sed files")  # fmt: skip


def fill(top: Path) -> None:
    (top / "tree").mkdir(parents=True)
    (top / "tree" / "leaf").write_text("old")
    (top / "file").write_text("old")


def state(top: Path) -> list[tuple[str, int, str]]:
    """Return every name below a directory with its mode and content."""
    found = [top, *sorted(top.rglob("*"))]
    return [(str(p), p.lstat().st_mode, p.read_text() if p.is_file() else "") for p in found]


@pytest.mark.parametrize("op", OPS)
async def test_a_directory_that_becomes_a_link(
    core: Core, tmp_path: Path, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of what was judged becomes a link to what the rule holds, before the change is made."""
    fill(tmp_path / "prod")
    fill(tmp_path / "free")
    (tmp_path / "spare").write_text("planted")
    spec = {"require_approval": [f"path:{tmp_path}/prod", f"path:{tmp_path}/prod/*"]}
    box = (await core.sandboxes.create(AGENT, convert(CreateSandbox, spec))).id
    before, judge = state(tmp_path / "prod"), Gate.change

    async def swap(*given: Any) -> Any:
        judged = await judge(*given)
        (tmp_path / "free").rename(tmp_path / "was")
        (tmp_path / "free").symlink_to("prod")
        return judged

    with monkeypatch.context() as patch:
        patch.setattr(Gate, "change", swap)
        with pytest.raises(errors.AtollError, match="link"):
            told = await work(core, box, op, str(tmp_path / "free"))
            raise errors.FileError(told["results"][0]["error"]["message"])  # sed tells of each file that was named
    assert state(tmp_path / "prod") == before
    (tmp_path / "free").unlink()
    (tmp_path / "was").rename(tmp_path / "free")
    await work(core, box, op, str(tmp_path / "free"))  # where nobody swaps, the same is done
    assert state(tmp_path / "prod") == before


@pytest.mark.parametrize("op", ("write", "write in place", "append", "chmod", "sed file", "sed files"))
async def test_a_file_that_becomes_a_link(core: Core, tmp_path: Path, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "prod")
    fill(tmp_path / "free")
    box = (
        await core.sandboxes.create(AGENT, convert(CreateSandbox, {"require_approval": [f"path:{tmp_path}/prod/*"]}))
    ).id
    before, judge = state(tmp_path / "prod"), Gate.change

    async def swap(*given: Any) -> Any:
        judged = await judge(*given)
        (tmp_path / "free" / "file").unlink()
        (tmp_path / "free" / "file").symlink_to("../prod/file")
        return judged

    with monkeypatch.context() as patch:
        patch.setattr(Gate, "change", swap)
        try:
            await work(core, box, op, str(tmp_path / "free"))
        except errors.AtollError as refused:
            assert "link" in str(refused)
    assert state(tmp_path / "prod") == before


async def test_links_that_stay_are_followed_as_ever(core: Core, tmp_path: Path) -> None:
    fill(tmp_path / "real")
    (tmp_path / "dir").symlink_to("real")
    (tmp_path / "name").symlink_to("dir/file")
    (tmp_path / "later").symlink_to("dir/later")
    box = (await core.sandboxes.create(AGENT, convert(CreateSandbox, {"require_approval": ["path:/nothing/here"]}))).id
    files = core.files
    told = await files.write(AGENT, box, f"{tmp_path}/name", b"one")
    assert told["stat"]["name"] == "file" and (tmp_path / "name").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "one"
    await files.write(AGENT, box, f"{tmp_path}/later", b"two", append=True)
    assert (tmp_path / "real" / "later").read_text() == "two"
    await files.ask(AGENT, box, "chmod", ChangeMode(path=f"{tmp_path}/name", mode=0o600))
    assert (tmp_path / "real" / "file").stat().st_mode & 0o777 == 0o600
    sed = await files.ask(AGENT, box, "sed", Sed(pattern="one", replacement="three", files=[f"{tmp_path}/name"]))
    assert sed["results"] == [{"path": f"{tmp_path}/real/file", "replacements": 1}]
    assert (tmp_path / "real" / "file").read_text() == "three"
    await files.ask(AGENT, box, "copy", CopyFile(src=f"{tmp_path}/name", dst=f"{tmp_path}/dir/copied"))
    assert (tmp_path / "real" / "copied").read_text() == "three"
    await files.ask(AGENT, box, "remove", RemoveFile(path=f"{tmp_path}/name"))
    assert not (tmp_path / "name").is_symlink() and (tmp_path / "real" / "file").exists()
    with pytest.raises(errors.FileNotFound, match=str(tmp_path / "real" / "none")):
        await files.ask(AGENT, box, "remove", RemoveFile(path=f"{tmp_path}/dir/none"))


TREES = (
    ("/workspace/*.py", "/workspace/sub"),
    ("*/id_rsa", "/home"),
    ("/etc/[cx]ron*/job", "/etc/cron.d"),
    ("/srv/?/x", "/srv/a"),
    ("/etc/*", "/"),
    ("/etc/passwd", "/etc"),
)


@pytest.mark.parametrize(("glob", "tree"), TREES)
async def test_a_tree_in_which_a_rule_may_hold(core: Core, tmp_path: Path, glob: str, tree: str) -> None:
    """A change of a whole tree waits where any path in it may match, also behind a `*`."""
    (tmp_path / tree.strip("/")).mkdir(parents=True, exist_ok=True)
    rules = [f"path:{tmp_path}{glob}" if glob.startswith("/") else f"path:{glob}"]
    box = (await core.sandboxes.create(AGENT, convert(CreateSandbox, {"require_approval": rules}))).id
    for change in (
        core.files.tar_in(AGENT, box, f"{tmp_path}{tree}", archive()),
        core.files.ask(AGENT, box, "remove", RemoveFile(path=f"{tmp_path}{tree}", recursive=True)),
    ):
        async with held(core, change) as (asked, _):
            assert asked.kind == "write"
