"""Files this machine adds to every image: its name server, `localhost`, and the certificate authorities it trusts.

The `host` image has them in its own `/etc`; any other gets them as one thin layer on top.
"""

import hashlib
import os
from pathlib import Path

from atoll.images.layers.tree import remove_tree, sync_tree
from atoll.images.registry.authorities import ADDED, BUNDLE, added, bundle
from atoll.images.sources.host_etc import HOSTS, RESOLV_CONF

_PLACES = (BUNDLE, "etc/ssl/cert.pem", "etc/pki/tls/certs/ca-bundle.crt", "etc/pki/tls/cert.pem",
           "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem")  # fmt: skip


def layer(cache: Path, extra_ca: Path | None, root: Path = Path("/")) -> Path:
    """The directory to lay on top of an image; made once for each content. Old ones stay: sandboxes may stand on them."""
    authorities, more = bundle(extra_ca, root), added(extra_ca, root)
    digest = hashlib.sha256("\0".join((RESOLV_CONF, HOSTS, authorities, more)).encode("utf-8", "replace")).hexdigest()
    target = cache / digest[:32]
    if target.is_dir():
        return target
    cache.mkdir(mode=0o711, parents=True, exist_ok=True)
    work = cache / f"work-{os.urandom(8).hex()}"
    try:
        _write(work, "etc/resolv.conf", RESOLV_CONF)
        _write(work, "etc/hosts", HOSTS)
        for place in _PLACES if authorities else ():
            _write(work, place, authorities)
        if more:
            _write(work, ADDED, more)
        sync_tree(work)
        try:
            os.rename(work, target)
        except OSError:
            if not target.is_dir():  # somebody else was first
                raise
    finally:
        remove_tree(work)
    return target


def _write(top: Path, place: str, text: str) -> None:
    """A file everyone may read, in directories everyone may enter, whatever our umask is."""
    path = top
    for part in ("", *place.split("/")[:-1]):
        path = path / part
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    file = top / place
    file.write_text(text, encoding="utf-8", errors="replace")
    file.chmod(0o644)
