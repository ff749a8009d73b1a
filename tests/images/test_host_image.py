"""The machine's own image: what is in it, what is hidden, and that it really starts programs."""

import json
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from atoll.errors import ImageError, Unsupported
from atoll.images import HostImage, ImageStore
from atoll.images.detect import host_program
from atoll.images.layers.tree import overlay_flavour
from atoll.images.sources import host_mask
from atoll.images.sources.host import build_host_image, find_host_image, forget_host_images
from atoll.images.sources.host_etc import plan, top_links, write

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting /usr of this machine as it is needs root")

RUN = """
set -e
cd "$1"; mkdir up work up2 work2 root
mount -t overlay overlay -o lowerdir="$2",upperdir=up,workdir=work root
mount -t overlay overlay -o lowerdir="$3",upperdir=up2,workdir=work2 root/usr
mount -t tmpfs tmpfs root/dev && mknod -m 666 root/dev/null c 1 3
exec chroot root /usr/bin/env -i PATH="$4" /bin/sh -c "$5"
"""


def small_usr(tmp_path: Path) -> Path:
    usr = tmp_path / "usr"
    for name in ("bin", "lib/python3.11", "private", "share/x"):
        (usr / name).mkdir(parents=True)
    for name, mode in (("bin/tool", 0o755), ("bin/secret", 0o600), ("share/x/half", 0o640), ("share/x/open", 0o644)):
        (usr / name).write_text("content")
        (usr / name).chmod(mode)
    (usr / "lib/python3.11/EXTERNALLY-MANAGED").write_text("no pip")
    (usr / "private/inside").write_text("x")
    (usr / "private").chmod(0o700)
    os.mkfifo(usr / "bin/pipe", 0o644)
    (usr / "bin/link").symlink_to("secret")
    return usr


def make(tmp_path: Path, usr: Path) -> HostImage:
    cache = tmp_path / "cache"
    cache.mkdir(exist_ok=True)
    return build_host_image(cache, overlay_flavour(cache), usr=usr)


def hidden(mask: Path) -> set[str]:
    return {
        str(path.relative_to(mask))
        for path in mask.rglob("*")
        if stat.S_ISCHR(path.lstat().st_mode) and path.lstat().st_rdev == 0
    }


def test_masks_what_root_alone_may_read(tmp_path: Path) -> None:
    """Private files and directories, pip's marker and special files are hidden; the rest is not in the mask."""
    usr = small_usr(tmp_path)
    image = make(tmp_path, usr)
    expected = {"bin/secret", "bin/pipe", "share/x/half", "lib/python3.11/EXTERNALLY-MANAGED", "private"}
    assert hidden(image.usr_mask) == expected
    assert stat.S_IMODE((image.usr_mask / "bin").stat().st_mode) == stat.S_IMODE((usr / "bin").stat().st_mode)
    assert (image.usr_mask / "bin").stat().st_uid == (usr / "bin").stat().st_uid


def test_notices_changes_of_usr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new private file, a directory made private, and in time a file made private are hidden too."""
    usr = small_usr(tmp_path)
    first = make(tmp_path, usr)
    assert make(tmp_path, usr) == first
    (usr / "bin/new").write_text("x")
    (usr / "bin/new").chmod(0o600)
    assert "bin/new" in hidden(make(tmp_path, usr).usr_mask)
    (usr / "share/x").chmod(0o750)
    assert "share/x" in hidden(make(tmp_path, usr).usr_mask)
    (usr / "bin/tool").chmod(0o711)
    now = time.time()
    monkeypatch.setattr(host_mask.time, "time", lambda: now + 7200)
    third = make(tmp_path, usr)
    assert "bin/tool" in hidden(third.usr_mask)
    assert "bin/tool" not in hidden(first.usr_mask), "an image in use is not changed"


def test_old_images_are_kept_while_in_use(tmp_path: Path) -> None:
    """A stopped sandbox finds the very image it was made from; when nothing uses it, it goes."""
    usr = small_usr(tmp_path)
    first = make(tmp_path, usr)
    (usr / "bin/another").write_text("x")
    (usr / "bin/another").chmod(0o600)
    second = make(tmp_path, usr)
    assert first.digest != second.digest
    cache = tmp_path / "cache"
    forget_host_images(cache, frozenset({first.digest}))
    found = find_host_image(cache, first.digest, usr)
    assert found is not None and found.usr_mask == first.usr_mask and found.usr_mask.is_dir()
    forget_host_images(cache, frozenset())
    assert find_host_image(cache, first.digest, usr) is None and not first.usr_mask.exists()
    assert second.skeleton.is_dir() and second.usr_mask.is_dir()


def test_skeleton_has_the_shape_of_a_machine(tmp_path: Path) -> None:
    image = make(tmp_path, small_usr(tmp_path))
    top = image.skeleton
    assert stat.S_IMODE((top / "tmp").stat().st_mode) == 0o1777 and stat.S_IMODE((top / "root").stat().st_mode) == 0o700
    for name in ("dev", "proc", "sys", "usr", "workspace", "opt", "home/user", "var/tmp"):
        assert (top / name).is_dir() and not (top / name).is_symlink()
    for name in ("bin", "lib"):
        assert os.readlink(top / name) == os.readlink(f"/{name}")
    assert os.listdir(top / "usr") == [] and os.listdir(top / "root") == []


def fake_root(tmp_path: Path) -> Path:
    root = tmp_path / "machine"
    etc = root / "etc"
    (etc / "ssl/certs").mkdir(parents=True)
    (etc / "alternatives").mkdir()
    (etc / "passwd").write_text(
        "root:x:0:0:Big Boss:/root:/bin/bash\ndaemon:x:1:1:d:/usr/sbin:/usr/sbin/nologin\n"
        "maria:x:1001:1001:Maria M.:/home/maria:/bin/bash\nnobody:x:65534:65534::/:/usr/sbin/nologin\n+::::::\nodd\n"
    )
    (etc / "group").write_text("root:x:0:\nsudo:x:27:maria\nmaria:x:1001:\n")
    (etc / "shadow").write_text("root:$6$secret:1::::::\n")
    (etc / "ssl/certs/ca-certificates.crt").write_text("-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n")
    (etc / "npmrc").write_text("//registry/:_authToken=secret\n")
    (etc / "pip.conf").write_text("index-url = https://user:secret@host\n")
    (etc / "gitconfig").write_text("secret\n")
    (etc / "hosts").write_text("10.0.0.5 secret-db\n")
    (etc / "resolv.conf").write_text("nameserver 10.0.0.1\n")
    (etc / "services").write_text("http 80/tcp\n")
    (etc / "profile").write_text("secret\n")
    (etc / "profile").chmod(0o600)
    (etc / "alternatives/editor").symlink_to("/usr/bin/vi")
    return root


def test_etc_holds_the_short_list_and_no_secret(tmp_path: Path) -> None:
    """Names of people, hashes, tokens, private host names and unreadable files stay outside."""
    root, target = fake_root(tmp_path), tmp_path / "out"
    target.mkdir()
    write(plan(root, None), target)
    texts = {
        str(path.relative_to(target)): path.read_text()
        for path in target.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    for word in ("secret", "maria", "Maria", "Boss", "10.0.0"):
        assert not [name for name, text in texts.items() if word in text], word
    assert texts["passwd"].startswith("root:x:0:0::/root:/bin/bash\n") and "user:x:1000:1000" in texts["passwd"]
    assert "sudo:x:27:\n" in texts["group"] and texts["shadow"].startswith("root:*:")
    assert texts["services"] == "http 80/tcp\n" and texts["resolv.conf"].startswith("nameserver 100.96.")
    assert os.readlink(target / "alternatives/editor") == "/usr/bin/vi"
    assert not (target / "npmrc").exists() and not (target / "profile").exists()


def test_operators_certificate_joins_the_bundle(tmp_path: Path) -> None:
    root, target, extra = fake_root(tmp_path), tmp_path / "out", tmp_path / "extra.pem"
    target.mkdir()
    extra.write_text("-----BEGIN CERTIFICATE-----\nB\n-----END CERTIFICATE-----\n")
    before = plan(root, None)
    with_extra = plan(root, extra)
    assert before.fingerprint != with_extra.fingerprint
    write(with_extra, target)
    bundle = (target / "ssl/certs/ca-certificates.crt").read_text()
    assert "\nA\n" in bundle and "\nB\n" in bundle and bundle.count("BEGIN") == 2
    (tmp_path / "bad.pem").write_text("hello")
    for path in (tmp_path / "bad.pem", tmp_path / "missing.pem"):
        with pytest.raises(ImageError):
            plan(root, path)


def test_machines_without_a_merged_usr_are_told(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with pytest.raises(Unsupported, match="/bin"):
        top_links(tmp_path)


def run_in(image: HostImage, tmp_path: Path, script: str) -> "subprocess.CompletedProcess[str]":
    """Run a shell script on the image's two stacks, in a mount namespace that ends with it."""
    work = tmp_path / "mounts"
    work.mkdir()
    lowers = ":".join(map(str, image.lowers)), ":".join(map(str, image.usr_lowers))
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", RUN, "sh", str(work), *lowers]
    return subprocess.run(
        [*command, image.env["PATH"], script], capture_output=True, text=True, timeout=120, check=False
    )


@root_only
def test_hidden_files_cannot_be_reached_by_root(tmp_path: Path) -> None:
    """Root inside sees neither the names nor, through a link, the content; everything else is there."""
    image = make(tmp_path, small_usr(tmp_path))
    point = tmp_path / "point"
    point.mkdir()
    script = (
        'mount -t overlay overlay -o ro,lowerdir="$2" "$1" && cd "$1" && ls . bin share/x && cat share/x/open bin/link'
    )
    lowers = ":".join(map(str, image.usr_lowers))
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(point), lowers],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    listed = set(done.stdout.split())
    assert {"bin", "tool", "link", "open", "content"} <= listed, done.stderr
    assert not {"private", "secret", "pipe", "half"} & listed and "bin/link" in done.stderr


@root_only
def test_real_programs_start_in_it(tmp_path: Path) -> None:
    """On this machine's real /usr: Python starts, verifies with the CA bundle, and nothing of it is written."""
    if not shutil.which("python3", path="/usr/bin"):
        pytest.skip("this machine has no /usr/bin/python3")
    image = ImageStore(tmp_path / "store").host_image()
    script = """
    echo mine > /usr/share/written && cat /usr/share/written; ls /home
    python3 -c 'import json, os, ssl, glob, pwd
print(json.dumps([
  len(ssl.create_default_context(cafile="/etc/ssl/certs/ca-certificates.crt").get_ca_certs()) > 0,
  glob.glob("/usr/lib/python3*/EXTERNALLY-MANAGED"), os.listdir("/root"), os.listdir("/workspace"),
  pwd.getpwnam("user").pw_dir]))'
    """
    done = run_in(image, tmp_path, script)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["mine", "user"], done.stderr
    assert json.loads(lines[2]) == [True, [], [], [], "/home/user"]
    assert not Path("/usr/share/written").exists()


def test_everyday_11_python_is_where_python3_is(tmp_path: Path) -> None:
    usr = small_usr(tmp_path)
    assert not os.path.lexists(make(tmp_path, usr).usr_mask / "bin/python")
    (usr / "bin/python3").write_text("#!")
    (usr / "bin/python3").chmod(0o755)
    mask = make(tmp_path, usr).usr_mask
    assert os.readlink(mask / "bin/python") == "python3"
    (usr / "bin/python").symlink_to("python2")  # the machine's own stays
    assert not os.path.lexists(make(tmp_path, usr).usr_mask / "bin/python")


def test_everyday_11_the_host_has_python_if_it_has_python3(tmp_path: Path) -> None:
    for name in ("python3", "other"):
        program = tmp_path / "usr/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!")
        program.chmod(0o755)
    assert host_program("python", tmp_path) == tmp_path / "usr/bin/python3"
    assert host_program("python2", tmp_path) is None
