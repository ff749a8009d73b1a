"""A real PostgreSQL for tests: Debian's, in a directory of its own, on a Unix socket that nobody else uses."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

USER = "postgres"
FAST = "-c fsync=off -c full_page_writes=off -c listen_addresses='' -c shared_buffers=16MB -c max_connections=40"


def _program(name: str) -> str:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name) or ""


class Postgres:
    """A server, which can be stopped and started again with what it holds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made = 0

    def _run(self, *words: str) -> None:
        """Run a program of PostgreSQL, as a user that it accepts."""
        root = os.geteuid() == 0
        drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if root else []
        # Its output goes to a file: the server keeps what it was given, and a pipe would never end.
        with open(self.directory / "run.log", "ab") as output:
            done = subprocess.run([*drop, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        assert done.returncode == 0, (self.directory / "run.log").read_text()

    def make(self) -> None:
        if os.geteuid() == 0:
            shutil.chown(self.directory, USER, USER)
        data = str(self.directory / "data")
        self._run(_program("initdb"), "-D", data, "-A", "trust", "-U", USER, "-N", "-E", "UTF8", "--locale=C")

    def start(self) -> None:
        log = str(self.directory / "log")
        options = f"{FAST} -c unix_socket_directories={self.directory}"
        words = ["-D", str(self.directory / "data"), "-l", log, "-o", options, "-w", "-t", "120", "start"]
        self._run(_program("pg_ctl"), *words)

    def stop(self, mode: str = "immediate") -> None:
        self._run(_program("pg_ctl"), "-D", str(self.directory / "data"), "-m", mode, "-w", "-t", "120", "stop")

    def words(self, database: str = "postgres") -> str:
        return f"host={self.directory} user={USER} dbname={database}"

    def database(self) -> str:
        """Return the connection string of a new, empty database."""
        import psycopg

        self._made += 1
        name = f"test{self._made}"
        with psycopg.connect(self.words(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.words(name)


@contextmanager
def postgres(directory: Path) -> Iterator[Postgres]:
    """Run a server inside the block. `directory` must be short: a socket is made in it."""
    if not _program("initdb"):
        pytest.skip("PostgreSQL is not installed: scripts/install-system.sh test")
    pytest.importorskip("psycopg")
    server = Postgres(directory)
    server.make()
    server.start()
    try:
        yield server
    finally:
        server.stop()
