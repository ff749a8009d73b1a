"""LIF-08: a create that fails leaves nothing. tests/backend/test_gone.py puts a fault into every step; here it goes through
the public face, with the name free again afterwards."""

import pytest
from lab.sandboxes import Lab, left

from atoll import Sandbox, errors


def test_failures_leave_nothing_and_free_the_name(own_lab: Lab, runtime: str) -> None:
    """Wrong image, runtime, mount, working directory and host: each a typed error; then the same name works."""
    faults = [
        {"image": "no-such-image.invalid/x:1"},
        {"runtime": "kata"},
        {"workdir": "/no/such/place"},
        {"workdir": "/etc/passwd"},
        {"mounts": [{"source": "/no/such", "target": "/x"}]},
        {"mounts": [{"source": "/tmp", "target": "/proc/x"}]},
        {"hosts": ["not a host"], "network": True},
        {"disk_mb": 1 << 24},
    ]
    for fault in faults:
        with pytest.raises(errors.AtollError):
            own_lab.create(name="half-made", **{"runtime": runtime, **fault})
        assert Sandbox.list(home=own_lab.home, state="all") == []
        assert not any(left(own_lab.mark, own_lab.home).values()), fault
    with own_lab.sandbox(name="half-made", runtime=runtime) as made:
        assert made.exec("echo whole").stdout == "whole\n"
