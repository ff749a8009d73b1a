"""A daemon with a TCP door, and callers that hold one of its keys."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.client._sync.secure import RemoteLink
from lab.gateway import Gateway


@contextmanager
def keyed_daemon(config: str = '[sandboxes]\nruntime = "container"\n') -> Iterator[Gateway]:
    """A daemon process on a home of its own, with these settings."""
    home = Path(tempfile.mkdtemp(prefix="atoll-keys-"))
    (home / "config.toml").write_text(config)
    made = Gateway(home)
    try:
        made.start()
        yield made
    finally:
        made.close()
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def holder(gateway: Gateway, name: str, *scopes: str) -> Iterator[RemoteLink]:
    """A client with a new key of that name."""
    secret = gateway.key(name, scopes=scopes or ("use",)).secret
    link = RemoteLink(gateway.endpoint, api_key=secret, ca_cert=str(gateway.home / "tls" / "sandbox-ca.crt"))
    try:
        yield link
    finally:
        link.close()
