"""Images built from Debian packages: one real, small build, and how its sources are found."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from atoll.errors import AtollError
from atoll.images import Image, ImageStore, Progress
from atoll.images.catalog import default_debian_sources
from atoll.images.sources import debian

pytestmark = pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed")


def test_builds_a_small_image_that_runs(tmp_path: Path) -> None:
    """The smallest set that can install more: one layer, no devices, no set-id bits, nothing of this machine's own."""
    store = ImageStore(tmp_path / "store")
    steps: list[Progress] = []
    image = store.build_debian("smallest", ["base-files"], steps.append, variant="apt")
    assert image.notes[0].startswith("Debian's base-files ") and image.notes[0][-1].isdigit()
    assert image.source == "debian" and len(image.lowers) == 1 and image.size > 10_000_000
    top = image.lowers[0]
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            mode = os.lstat(os.path.join(directory, name)).st_mode
            assert stat.S_IFMT(mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
            assert stat.S_ISLNK(mode) or not mode & 0o6000
    assert os.listdir(top / "dev") == [] and not (top / "etc/apt/apt.conf.d/99mmdebstrap").exists()
    assert store.resolve("smallest") == image and [item.name for item in store.list()] == ["smallest"]
    assert {step.stage for step in steps} == {"build", "done"} and os.listdir(store.root / "tmp") == []
    if os.geteuid() == 0:
        check_it_runs(image)
    store.remove("smallest")
    assert not top.exists()
    shutil.rmtree(store.root)


def test_everyday_11_versions_are_those_of_the_authors(tmp_path: Path) -> None:
    status = tmp_path / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    rows = {"golang-go": "2:1.19~1", "ruby": "1:3.1", "php-cli": "2:8.2+93", "python3": "3.11.2-1+b1", "other": "9"}
    status.write_text(
        "".join(f"Package: {name}\nStatus: ok\nVersion: {at}\nDescription: x\n y: z\n\n" for name, at in rows.items())
    )
    found = debian.versions(tmp_path, ["golang-go", "ruby", "php-cli", "python3", "missing"])
    assert found == {"golang-go": "1.19", "ruby": "3.1", "php-cli": "8.2", "python3": "3.11.2"}
    assert debian.versions(tmp_path / "nothing", ["ruby"]) == {}


def check_it_runs(image: Image) -> None:
    script = ". /etc/os-release; echo $ID; dpkg-query -W apt | cut -f1; cat /etc/resolv.conf /etc/hostname"
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "chroot", str(image.lowers[0]), "/bin/sh", "-c", script],
        capture_output=True, text=True, timeout=120, check=False, env={"PATH": image.env["PATH"]},
    )  # fmt: skip
    distribution = next(line[3:] for line in Path("/etc/os-release").read_text().splitlines() if line.startswith("ID="))
    assert done.stdout.split() == [distribution, "apt", "sandbox"], done.stderr


def test_a_failed_build_tells_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that are not there: the error has mmdebstrap's own words, and no image appears."""
    source = f"deb [trusted=yes] file://{tmp_path}/no-such-mirror stable main"
    monkeypatch.setattr(debian, "machine_sources", lambda: (source,))
    store = ImageStore(tmp_path / "store")
    with pytest.raises(AtollError) as caught:
        store.build_debian("broken", [])
    assert "mmdebstrap" in caught.value.message and caught.value.details["log"]
    assert store.list() == () and os.listdir(store.root / "tmp") == [] and os.listdir(store.root / "layers") == []


def test_a_callback_that_raises_stops_the_build(tmp_path: Path) -> None:
    """Giving up ends mmdebstrap, and the caller gets its own exception back."""

    class GaveUp(Exception):
        pass

    def give_up(_step: Progress) -> None:
        raise GaveUp

    store = ImageStore(tmp_path / "store")
    with pytest.raises(GaveUp):
        store.build_debian("given-up", [], give_up)
    assert store.list() == () and os.listdir(store.root / "tmp") == [] and os.listdir(store.root / "layers") == []


def test_sources_are_the_distributions_own(tmp_path: Path) -> None:
    """Both formats are read; disabled, source-only, and vendors' entries are passed over."""
    lists = tmp_path / "apt/sources.list.d"
    lists.mkdir(parents=True)
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_CODENAME="trixie"\n')
    (tmp_path / "apt/sources.list").write_text(
        "# deb http://old/debian trixie main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://mirror/debian trixie main contrib # note\n"
        "deb-src http://mirror/debian trixie main\ndeb http://vendor/apt vendor-trixie main\n"
    )
    (lists / "security.sources").write_text(
        "Types: deb deb-src\n# comment\nURIs: http://mirror/security\nSuites: trixie-security\n  trixie-updates\n"
        "Components: main\nSigned-By: /s.gpg\n\nEnabled: no\nTypes: deb\nURIs: http://off\nSuites: trixie\nComponents: main\n"
    )
    (lists / "vendor.list").write_text("deb https://vendor.example.com/node nodistro main\n")
    assert debian.machine_sources(tmp_path) == (
        "deb [signed-by=/k.gpg] http://mirror/debian trixie main contrib",
        "deb [signed-by=/s.gpg] http://mirror/security trixie-security main",
        "deb [signed-by=/s.gpg] http://mirror/security trixie-updates main",
    )
    assert debian.machine_sources(tmp_path / "missing") == default_debian_sources()


def test_everyday_4_the_builders_own_error_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many lines after the first error, as apt and dpkg write them: the first is told."""
    tool = tmp_path / "bin" / "mmdebstrap"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho 'I: start' >&2\necho 'dpkg: error processing package ruby (--configure):' >&2\n"
        "for i in $(seq 40); do echo \"I: line $i\" >&2; done\necho 'E: setup failed' >&2\nexit 25\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    with pytest.raises(AtollError) as caught:
        ImageStore(tmp_path / "store").build_debian("broken", [])
    assert "dpkg: error processing package ruby" in caught.value.message
    assert "E: setup failed" in caught.value.message and "25" in caught.value.message


def test_everyday_4_a_refused_archive_is_not_blamed_on_the_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unpacker gives up in the middle: its reason is told, not the signal that ended mmdebstrap."""
    tool = tmp_path / "bin" / "mmdebstrap"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nhead -c 100000 /dev/urandom\nwhile :; do echo more; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    with pytest.raises(AtollError) as caught:
        ImageStore(tmp_path / "store").build_debian("broken", [])
    assert caught.value.message.startswith("the archive has"), caught.value.message
