"""One agent of a pod for each test; the test itself runs in the gateway's network."""

from collections.abc import Iterator

import pytest
from lab.pods import Pod, can_run_pods

from atoll.egress.router.netlink import inside_net


@pytest.fixture
def pod() -> Iterator[Pod]:
    if not can_run_pods():
        pytest.skip("needs root, and the agent of pods (make pod-agent)")
    made = Pod()
    try:
        with inside_net(made.gateway_net):
            yield made
    finally:
        made.close()
