"""`run --build` and `[build]`: the project's own Dockerfile, built when it is asked for."""

import os
from pathlib import Path

import pytest
from lab.command_line import Cli

FILE = "FROM host\nARG WORD=one\nCOPY note /note\nRUN echo $WORD >> /note\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's host image has one owner")
def test_ak_K9_a_dockerfile_is_built_when_it_is_asked_for(cli: Cli, project: Path) -> None:
    (project / "note").write_text("first\n")
    (project / "Dockerfile").write_text(FILE)
    plain = cli("run", "cat", "/note")
    assert plain.code != 0
    built = cli("run", "--build", "cat", "/note")
    assert built.stdout == b"first\none\n", built.stderr
    assert cli("run", "--build", "--image", "host", "true").code == 125
    (project / "note").write_text("second\n")
    (project / "agentkernel.toml").write_text('[build]\n[build.args]\nWORD = "two"\n')
    named = cli("run", "--config", "agentkernel.toml", "cat", "/note")
    assert named.stdout == b"second\ntwo\n", named.stderr
