"""The store on disk: names, removal, pruning, other processes, and that half an image never counts."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.images import Member, RegistryServer, build_image, digest_of, make_tar

from atoll.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from atoll.images import Image, ImageStore, Progress, TerminalBar
from atoll.images import store as store_module
from atoll.images.image import check_workdir
from atoll.images.layers.tree import remove_tree

BASE = make_tar(Member("base", b"b" * 1000))


def push_and_pull(registry: RegistryServer, store: ImageStore, name: str, *layers: bytes) -> Image:
    return store.pull(registry.push(f"store/{name}", "1", build_image(*layers)))


def layer_count(store: ImageStore) -> int:
    return len([name for name in os.listdir(store.root / "layers") if not name.endswith(".json")])


def test_remove_keeps_layers_that_others_use(registry: RegistryServer, store: ImageStore) -> None:
    """Removing an image gives back its own layers only, and says how much."""
    one = push_and_pull(registry, store, "one", BASE, make_tar(Member("x", b"1" * 10)))
    two = push_and_pull(registry, store, "two", BASE, make_tar(Member("x", b"2" * 20)))
    assert store.disk_bytes() == 1030 and one.size == 1010
    assert store.remove(one.name) == 10
    assert store.find(one.name) is None and layer_count(store) == 2
    assert (two.lowers[1] / "base").exists()
    assert store.remove(two.name) == 1020 and layer_count(store) == 0 and store.list() == ()
    with pytest.raises(NotFound):
        store.remove(two.name)


def test_an_image_with_two_names_stays_for_the_other(registry: RegistryServer, store: ImageStore) -> None:
    built = build_image(BASE)
    first, second = (store.pull(registry.push("store/alias", tag, built)) for tag in ("1", "2"))
    assert first.digest == second.digest
    assert store.remove(first.name) == 0
    assert store.resolve(second.name).lowers[0].is_dir()


def test_remove_by_digest_takes_every_name(registry: RegistryServer, store: ImageStore) -> None:
    built = build_image(BASE)
    for tag in ("1", "2"):
        store.pull(registry.push("store/names", tag, built))
    store.remove(built.digest)
    assert store.list() == () and layer_count(store) == 0


def test_images_in_use_are_not_removed(registry: RegistryServer, store: ImageStore) -> None:
    image = push_and_pull(registry, store, "used", BASE)
    with pytest.raises(FailedPrecondition):
        store.remove(image.name, in_use=[image.digest])
    assert store.resolve(image.name) == image and image.lowers[0].is_dir()


def test_prune_removes_what_nothing_needs(registry: RegistryServer, store: ImageStore) -> None:
    """Leftovers of crashes and broken downloads go; named images stay."""
    image = push_and_pull(registry, store, "kept", BASE)
    (store.root / "tmp" / "layer-1-dead").mkdir()
    (store.root / "tmp" / "layer-1-dead" / "file").write_text("x")
    (store.root / "blobs" / ("sha256-" + "0" * 64)).write_bytes(b"partial")
    (store.root / "layers" / ("f" * 64)).mkdir()
    pruned = store.prune()
    assert pruned.images == () and pruned.layers == 1 and pruned.bytes >= 7
    assert os.listdir(store.root / "tmp") == [] and os.listdir(store.root / "blobs") == []
    assert store.resolve(image.name) == image and layer_count(store) == 1


def test_an_image_that_lost_a_layer_does_not_count(registry: RegistryServer, store: ImageStore) -> None:
    """A missing layer makes the image absent, and pulling mends it."""
    image = push_and_pull(registry, store, "lost", BASE)
    remove_tree(image.lowers[0])
    assert store.find(image.name) is None and store.list() == ()
    assert (store.pull(image.name).lowers[0] / "base").read_bytes() == b"b" * 1000


CRASH = """
import io, os, sys
from pathlib import Path
from atoll.images import ImageStore
store = ImageStore(Path(sys.argv[1]))
class Dies(io.RawIOBase):
    def __init__(self, data): self.data = data
    def read(self, n=-1):
        if not self.data: os._exit(42)
        piece, self.data = self.data[:700], self.data[700:]
        return piece
store._layers.add(Dies(Path(sys.argv[2]).read_bytes()), None, lambda n: None)
"""


def test_a_crash_while_unpacking_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """A process that dies in the middle leaves no layer; the next one clears its remains."""
    raw = make_tar(Member("a", b"x" * 5000), Member("b", b"y" * 5000))
    (tmp_path / "cut").write_bytes(raw[:7000])
    root = tmp_path / "store"
    command = [sys.executable, "-c", CRASH, str(root), str(tmp_path / "cut")]
    assert subprocess.run(command, timeout=120, check=False).returncode == 42
    store = ImageStore(root)
    assert layer_count(store) == 0 and len(os.listdir(root / "tmp")) == 1
    store.prune()
    assert os.listdir(root / "tmp") == []
    layer = store._layers.add(io.BytesIO(raw), digest_of(raw), lambda _count: None)
    assert (layer.path / "b").read_bytes() == b"y" * 5000


HOLD = """
import sys
from pathlib import Path
from atoll.images.locks import file_lock
with file_lock(Path(sys.argv[1]), shared=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_removal_waits_for_pulls_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process pulls, pruning gives up with an error that says so, and touches nothing."""
    monkeypatch.setattr(store_module, "_REMOVAL_SECONDS", 0.2)
    store = ImageStore(tmp_path / "store")
    (store.root / "tmp" / "work").mkdir()
    command = [sys.executable, "-c", HOLD, str(store.root / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(Unavailable, match="busy"):
            store.prune()
        assert os.listdir(store.root / "tmp") == ["work"]
        other.communicate(timeout=120)
    store.prune()
    assert os.listdir(store.root / "tmp") == []


def test_names_for_local_images(tmp_path: Path) -> None:
    """Names of the catalog, `host`, and what could be mistaken for a path or reference are refused."""
    store = ImageStore(tmp_path / "store")
    for name in ("python", "host", "", "A", "../x", "a/b", "a:b", "-a", "a" * 64, "a\n"):
        with pytest.raises(InvalidArgument):
            store.build_debian(name, ["git"])
    for package in ("--help", "a b", "./x.deb", "?name(x)", "a;b", "a,b", "A"):
        with pytest.raises(InvalidArgument, match="package"):
            store.build_debian("mine", [package])


def test_unknown_images_say_how_to_get_them(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    with pytest.raises(NotFound) as caught:
        store.resolve("ubuntu:24.04")
    assert "atoll image pull ubuntu:24.04" in caught.value.hint
    assert store.find("sha256:" + "0" * 64) is None and store.find("host") is None


@pytest.mark.parametrize(
    ("text", "path"), [("", "/"), ("/", "/"), ("app", "/app"), ("//a//b/", "/a/b"), (".", "/"), ("/procs", "/procs")]
)
def test_plain_working_directories(text: str, path: str) -> None:
    assert check_workdir(text) == path


def test_progress_on_a_terminal_and_elsewhere() -> None:
    """A terminal gets one line that is drawn over; a pipe gets one line per stage; neither gets control bytes."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream in (Terminal(), io.StringIO()):
        bar = TerminalBar(stream, interval=0)
        for done in (0, 500_000, 2_000_000):
            bar(Progress("download", "evil\x1b[2J", done, 2_000_000))
        bar.close()
        text = stream.getvalue()
        assert "\x1b[2J" not in text and "evil?[2J" in text
        assert ("2.0 MB/2.0 MB" in text) == stream.isatty() and (text.count("\n") == 1) == (not stream.isatty())


def test_everyday_11_what_came_of_it_stays_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    bar = TerminalBar(stream := Terminal(), interval=0)
    bar(Progress("build", "packages"))
    bar(Progress("done", "this is another version"))
    bar.close()
    assert stream.getvalue().endswith("\r\x1b[Kthis is another version\n")
    assert " 0 s of one to five minutes " in stream.getvalue(), "a build says what to expect"
    TerminalBar(piped := io.StringIO())(Progress("build", "packages"))
    assert piped.getvalue() == "build: 0 s of one to five minutes: packages\n"


def test_layers_side_by_side_are_one_line_each() -> None:
    stream = io.StringIO()
    bar = TerminalBar(stream)
    for done in range(1, 6):
        for layer in ("a", "b"):
            bar(Progress("download", layer, done, 10))
            bar(Progress("unpack", layer, done, 10))
    begun = [f"{stage}: 1 B/10 B {layer}" for stage in ("download", "unpack") for layer in ("a", "b")]
    assert sorted(stream.getvalue().splitlines()) == begun


def test_records_are_plain_json(registry: RegistryServer, store: ImageStore) -> None:
    image = push_and_pull(registry, store, "json", BASE)
    assert json.loads(json.dumps(image.to_json()))["layers"] == [str(image.lowers[0])]
