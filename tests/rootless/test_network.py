"""Without root: sandboxes reach listed hosts by name through the broker, and nothing else.

Every bypass is tried for an ordinary user in `test_suites.py`, on a test internet; here it is the real one, if there is one.
"""

import json
import shutil
import socket

import pytest
from lab.rootless import PATIENCE, User

from atoll.egress import default_hosts

RUNTIMES = ["container", pytest.param("gvisor", marks=pytest.mark.skipif(not shutil.which("runsc"), reason="no runsc"))]
TRY = """
import socket
def attempt(host, port):
    try: socket.create_connection((host, port), 20).close(); return 'reached'
    except socket.gaierror: return 'no such name'
    except ConnectionRefusedError: return 'refused'
    except OSError as error: return type(error).__name__
print(attempt('unlisted.example', 443), attempt('192.0.2.77', 443), attempt('169.254.169.254', 80), attempt('%s', %d), sep=', ')
"""


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_pip_installs_and_the_module_is_there(user: User, runtime: str) -> None:
    """From the real index, by the default list, with nothing configured."""
    try:
        socket.create_connection((default_hosts()[0], 443), 10).close()
    except OSError:
        pytest.skip("the index cannot be reached from this machine")
    session = user.json("sandbox", "create", "--runtime", runtime)["session_id"]
    install = "pip install --quiet --no-cache-dir --disable-pip-version-check six && python3 -c 'import six; print(six.__name__)'"
    try:
        words = ("--lang", "bash", "--session-id", session, "--timeout", str(int(PATIENCE * 2)))
        done = user.atoll("sandbox", "run", install, *words)
        assert done.returncode == 0 and json.loads(done.stdout)["stdout"] == "six\n", (
            done.stdout,
            done.stderr,
            user.log(),
        )
    finally:
        user.json("sandbox", "destroy", session)


def test_what_is_not_listed_is_out_of_reach(user: User) -> None:
    """Another name, a raw address, the metadata service, and a port of the machine itself."""
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
            own = str(probe.getsockname()[0])
        except OSError:
            own = "127.0.0.1"
        port = server.getsockname()[1]
        socket.create_connection((own, port), 30).close()  # control: from outside it is there
        done = user.atoll("sandbox", "run", TRY % (own, port), "--lang", "python")
        answer = json.loads(done.stdout)
        assert answer["stdout"] == "no such name, refused, refused, refused\n", answer
        user.json("sandbox", "destroy", answer["session_id"])


def test_doctor_says_what_this_user_lacks(user: User) -> None:
    """On the real machine: ids as they were given, no control groups, egress enforced, the container runtime works."""
    done = user.atoll("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    many = any(line.startswith(f"{user.name}:") for line in open("/etc/subuid"))  # noqa: SIM115
    assert checks["id ranges"]["ok"] is many and (many or "--add-subuids" in checks["id ranges"]["fix"])
    assert (
        not checks["delegation"]["ok"] and checks["delegation"]["fix"] and "not held" in checks["delegation"]["detail"]
    )
    assert checks["user namespaces"]["ok"] and checks["runtime container"]["ok"] and checks["egress"]["ok"], checks
