"""Without root: the egress broker is the user too, so what it carries for a sandbox must not pass for the user at atoll's own doors."""

import json
import re
import subprocess
from collections.abc import Iterator

import pytest
from lab.rootless import PATIENCE, User

ASK = """
import urllib.request, urllib.error
for path in ('health', 'sandboxes'):
    asked = urllib.request.Request('http://host.atoll.internal:%d/' + path, headers={'Host': 'localhost'})
    try: print(path, urllib.request.urlopen(asked, timeout=60).status)
    except urllib.error.HTTPError as error: print(path, error.code)
"""


@pytest.fixture
def door(user: User) -> Iterator[int]:
    """agentkernel's port, which asks its own user for no key."""
    argv = [user.python, "-m", "atoll", "serve", "--agentkernel", "--port", "0"]
    ids = ["setpriv", f"--reuid={user.uid}", f"--regid={user.uid}", "--clear-groups"]
    with subprocess.Popen([*ids, *argv], env=user.env, cwd=user.home, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            found = re.search(r":(\d+)", line.partition("http://")[2])
            assert found, line
            yield int(found[1])
        finally:
            server.terminate()
            server.wait(PATIENCE)


def test_a_sandbox_with_the_doors_port_is_not_the_user(user: User, door: int) -> None:
    """The port was opened to it, and it gets as far as anybody without a key; from outside the user itself is served."""
    fetch = ASK.replace("host.atoll.internal", "127.0.0.1") % door
    assert user.run("/usr/bin/python3", "-c", fetch).stdout.split() == [
        "health",
        "200",
        "sandboxes",
        "200",
    ]
    made = user.json("sandbox", "create", "--runtime", "container", "--host-access", str(door))["session_id"]
    try:
        done = user.json("sandbox", "run", ASK % door, "--lang", "python", "--session-id", made)
        assert done["stdout"].split() == ["health", "200", "sandboxes", "401"], json.dumps(done)
    finally:
        user.json("sandbox", "destroy", made)
