"""The `/etc` of the `host` image: a short list of files programs need to start, never the machine's own whole.

Copied are files everyone may read and which hold no setting of the owner: package manager configurations are left out
because tokens live there. Accounts, host names and name service are written here, not copied.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ImageError, Unsupported
from atoll.images.registry.authorities import ADDED, BUNDLES, added, read_certificates

_MAX_FILE_BYTES = 8 << 20
_MAX_FILES = 20_000
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_COPIED = (
    "adduser.conf", "alternatives", "bash.bashrc", "ca-certificates.conf", "crypto-policies", "debian_version",
    "deluser.conf", "fedora-release",
    "fonts", "gai.conf", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias",
    "localtime", "login.defs", "magic", "magic.mime", "maven/logging", "maven/m2.conf", "mime.types", "os-release",
    "perl", "php", "profile", "protocols", "python3", "redhat-release", "rpc", "services", "shells", "ssl/certs",
    "ssl/openssl.cnf", "terminfo", "timezone", "pki/tls/openssl.cnf", "R", "mono/config",
)  # fmt: skip
_COPIED_PREFIXES = ("java-", "python3.")
HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
# DNS is answered whatever address it is sent to, so this one serves every sandbox; without network it fails at once.
RESOLV_CONF = "nameserver 100.96.0.1\noptions timeout:5 attempts:2\n"
_NSSWITCH = (
    "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nservices: files\nprotocols: files\n"
)
# Root becomes anybody without a password, nobody else becomes another: the accounts have no passwords, and no program
# of a sandbox gains rights by starting. The machine's own rules stay outside, with the directories and keys they name.
_PAM_ROOT = """\
auth sufficient pam_rootok.so
auth required pam_unix.so
account required pam_unix.so
password required pam_unix.so
session required pam_unix.so
"""
_PAM_OTHER = "".join(f"{kind} required pam_deny.so\n" for kind in ("auth", "account", "password", "session"))
_PAM_TOOLS = (
    "chfn", "chgpasswd", "chpasswd", "chsh", "groupadd", "groupdel", "groupmod", "newusers", "passwd", "runuser",
    "runuser-l", "su", "su-l", "useradd", "userdel", "usermod",
)  # fmt: skip
_SYSTEM_IDS = range(0, 1000)
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class EtcPlan:
    """The content of `/etc`: copies by path, texts by name, and a fingerprint of all of it."""

    root: Path
    copies: tuple[str, ...]  # relative to root, links and files
    texts: dict[str, str]
    fingerprint: str


def top_links(root: Path) -> dict[str, str]:
    """`/bin` and friends as this machine has them; a machine that keeps programs outside /usr cannot offer this image."""
    links: dict[str, str] = {}
    for name in _MERGED:
        path = root / name
        if path.is_symlink():
            links[name] = os.readlink(path)
        elif path.exists():
            raise Unsupported(
                f"this machine keeps /{name} outside /usr, so it has no `host` image",
                hint="name another image, for example with --image python",
            )
    return links


def plan(root: Path, extra_ca: Path | None) -> EtcPlan:
    """Decide what to copy and write, cheaply: only names and stamps are read, except for a few small files."""
    digest = hashlib.sha256()
    copies: list[str] = []
    for name in _names(root / "etc"):
        for path in _files(root / "etc" / name):
            if len(copies) >= _MAX_FILES:
                raise ImageError("this machine's /etc has more files than the `host` image takes")
            found = os.lstat(path)
            relative = str(path.relative_to(root))
            copies.append(relative)
            digest.update(
                f"{relative}\0{found.st_ino}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="replace")
            )
    texts = {
        "passwd": _passwd(root / "etc/passwd"),
        "group": _group(root / "etc/group"),
        "hosts": HOSTS,
        "hostname": "sandbox\n",
        "nsswitch.conf": _NSSWITCH,
        "resolv.conf": RESOLV_CONF,
        "pam.d/other": _PAM_OTHER,
        **{f"pam.d/{tool}": _PAM_ROOT for tool in _PAM_TOOLS},
    }
    texts["shadow"] = "".join(
        f"{line.split(':', 1)[0]}:*:19000:0:99999:7:::\n" for line in texts["passwd"].splitlines()
    )
    if extra_ca is not None:
        texts["extra-ca"] = read_certificates(extra_ca)
    if more := added(extra_ca, root):
        texts[ADDED] = more
    for name, text in sorted(texts.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return EtcPlan(root, tuple(copies), texts, digest.hexdigest())


def write(etc: EtcPlan, target: Path) -> None:
    """Make the planned `/etc` in the empty directory `target`."""
    for relative in etc.copies:
        destination = target / Path(relative).relative_to("etc")
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            _copy(etc.root / relative, destination)
        except FileNotFoundError:
            pass  # removed since the plan was made
    extra = etc.texts.get("extra-ca", "")
    for bundle in BUNDLES:
        _write_bundle(etc.root / bundle, target / Path(bundle).relative_to("etc"), extra)
    for name, text in etc.texts.items():
        if name != "extra-ca":
            path = target / name.removeprefix("etc/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_text(text)
            path.chmod(0o644)
    (target / "shadow").chmod(0o640)
    for directory, _, _ in os.walk(target):  # the daemon's umask is its own; inside, users other than root read these
        os.chmod(directory, 0o755)
    mtab = target / "mtab"
    mtab.symlink_to("../proc/self/mounts")


def _names(etc: Path) -> Iterator[str]:
    yield from _COPIED
    for entry in sorted(os.listdir(etc)):
        if entry.startswith(_COPIED_PREFIXES):
            yield entry


def _files(path: Path) -> Iterator[Path]:
    """Links and world-readable files at or below a path; other kinds, private and oversized ones are passed over."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        if found.st_mode & 0o005 == 0o005:
            for name in sorted(os.listdir(path)):
                yield from _files(path / name)
        return
    readable = stat.S_ISREG(found.st_mode) and found.st_mode & 0o004 and found.st_size <= _MAX_FILE_BYTES
    if readable or stat.S_ISLNK(found.st_mode):
        yield path


def _copy(source: Path, destination: Path) -> None:
    if source.is_symlink():
        destination.symlink_to(os.readlink(source))
        return
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        destination.write_bytes(file.read(_MAX_FILE_BYTES))
        destination.chmod(os.fstat(fd).st_mode & 0o755)


def _write_bundle(source: Path, destination: Path, extra: str) -> None:
    """The machine's CA bundle with its real content, also where the machine has a link, and the operator's CA."""
    try:
        content = source.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.unlink(missing_ok=True)
    destination.write_bytes(content.rstrip(b"\n") + b"\n" + extra.encode())
    destination.chmod(0o644)


def _passwd(path: Path) -> str:
    """The system's accounts, and one ordinary user; the names of the machine's people stay outside."""
    lines = []
    for fields in _account_lines(path, 7):
        number = int(fields[2])
        if number in _SYSTEM_IDS or number == _NOBODY:
            home = "/root" if number == 0 else fields[5]
            lines.append(f"{fields[0]}:x:{number}:{fields[3]}::{home}:{fields[6]}\n")
    if not any(line.startswith("root:") for line in lines):
        lines.insert(0, "root:x:0:0::/root:/bin/sh\n")
    return "".join(lines) + "user:x:1000:1000::/home/user:/bin/sh\n"


def _group(path: Path) -> str:
    lines = []
    for fields in _account_lines(path, 4):
        number = int(fields[2])
        if number in _SYSTEM_IDS or number == _NOBODY:
            lines.append(f"{fields[0]}:x:{number}:\n")
    return "".join(lines) + "user:x:1000:\n"


def _account_lines(path: Path, count: int) -> Iterator[list[str]]:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) == count and fields[2].isascii() and fields[2].isdigit() and fields[0] != "user":
            yield fields
