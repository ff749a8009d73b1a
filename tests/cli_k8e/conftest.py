"""A gateway as `atoll serve` makes one, and machines that use it: each with a home and an ATOLL_HOME of its own."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.command_line import WAIT, Cli, Done

__all__ = ["Done", "Gateway", "Machine"]


class Machine(Cli):
    """A machine with nothing but the program on it."""

    def __init__(self, name: str = "atoll") -> None:
        self.root = Path(tempfile.mkdtemp(prefix="atk-"))
        (self.root / "h").mkdir()
        super().__init__(str(self.root / "a"), str(self.root), name, HOME=str(self.root / "h"), TERM="xterm")

    @property
    def data(self) -> Path:
        return self.root / "a" / "sandbox"

    def close(self) -> None:
        self("daemon", "stop", "--force")
        shutil.rmtree(self.root, ignore_errors=True)


class Gateway(Machine):
    """A machine whose daemon is reached by others."""

    def __init__(self) -> None:
        super().__init__()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.root / "serve.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command("serve", "--grpc", "127.0.0.1:0"), stdin=subprocess.DEVNULL, stderr=log, env=self.env
            )
        until = time.monotonic() + WAIT
        while not (self.root / "a" / "grpc.endpoint").exists() or not (self.root / "a" / "daemon.sock").exists():
            log_text = (self.root / "serve.log").read_text()
            assert self.process.poll() is None and time.monotonic() < until, log_text
            time.sleep(0.05)

    @property
    def endpoint(self) -> str:
        return (self.root / "a" / "grpc.endpoint").read_text().split()[0]

    @property
    def ca(self) -> str:
        return str(self.root / "a" / "tls" / "sandbox-ca.crt")

    def key(self, *flags: str) -> str:
        """A key without limits of pace, so that tests are not slowed by it."""
        fast = [f"{name}=100000" for name in ("write_burst", "write_rate", "read_burst", "read_rate")]
        words = [word for quota in fast for word in ("--quota", quota)]
        return str(self.ok("key", "create", f"k-{os.urandom(4).hex()}", *words, *flags)["key"])

    def close(self) -> None:
        self("daemon", "stop", "--force")
        if self.process is not None:
            try:
                self.process.wait(WAIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(WAIT)
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def key(gateway: Gateway) -> str:
    return gateway.key()


@pytest.fixture
def bare() -> Iterator[Machine]:
    """A machine that knows of no gateway."""
    made = Machine()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def remote(gateway: Gateway, key: str, bare: Machine) -> Machine:
    """A machine that has the gateway's address, its CA and a key in its environment."""
    bare.env.update(K8E_SANDBOX_ENDPOINT=gateway.endpoint, K8E_SANDBOX_APIKEY=key, K8E_SANDBOX_CERT=gateway.ca)
    return bare
