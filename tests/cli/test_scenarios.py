"""The scenarios of K8E's document as a person types them, with the real registry where it can be reached."""

import pytest
from lab.sandboxes import reachable

from atoll.egress import default_hosts

from .conftest import Cli


def test_k8e_P20_a_quick_run_leaves_nothing_to_clean_up(cli: Cli, tenant: str) -> None:
    """Two runs share one automatic sandbox, which ends by itself."""
    first = cli.ok("sandbox", "run", "print(6 * 7)", "--lang", "python", "--tenant", tenant)
    assert (first["stdout"], first["exit_code"]) == ("42\n", 0)
    second = cli.ok("sandbox", "run", "echo again", "--tenant", tenant)
    assert second["session_id"] == first["session_id"]
    about = cli.ok("sandbox", "get", first["session_id"])
    assert about["idle_timeout_s"] == 1800 and about["expires_at"] is not None


def test_k8e_P21_install_then_import(cli: Cli, tenant: str) -> None:
    if not reachable(default_hosts()[0]):
        pytest.skip("the package index cannot be reached from this machine")
    code = "pip install --quiet --disable-pip-version-check six"
    done = cli("sandbox", "run", code, "--timeout", "150", "--tenant", tenant)
    assert done.code == 0, done
    seen = cli.ok("sandbox", "run", "import six; print(six.__version__)", "--lang", "python", "--tenant", tenant)
    assert seen["stdout"].count(".") == 2 and seen["exit_code"] == 0, seen
