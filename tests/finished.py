"""How a call of the program ended, for the tests that start it as people do."""

import json
from typing import Any


class Done:
    """A finished call."""

    def __init__(self, code: int, stdout: bytes, stderr: bytes) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def json(self) -> Any:
        """The one line of JSON that is all of its output."""
        lines = self.stdout.splitlines()
        assert len(lines) == 1, (self.stdout, self.stderr)
        return json.loads(lines[0])

    @property
    def text(self) -> str:
        return self.stdout.decode()

    def __repr__(self) -> str:
        return f"exit {self.code}\nstdout: {self.stdout[:3000]!r}\nstderr: {self.stderr[:3000]!r}"
