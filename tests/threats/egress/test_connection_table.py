"""F2, suspected: all sandboxes of the router share one connection table of the kernel, and together cannot fill it."""

import contextlib
import re
import subprocess

import pytest
from lab.internet import World

from atoll.egress.router.nft import TableShare


@pytest.mark.parametrize("size", [65536, 262144, 1 << 20])
def test_shares_never_fill_the_table(size: int) -> None:
    """Add up what each sandbox may take, for any number of them that the table can serve at all."""
    for links in (16, 32, 64, 256, 1024, 4096):
        share = TableShare.of(size, links)
        assert links * share.entries <= size, (links, share)
        assert share.connections >= 1


def test_share_in_force_follows_the_number_of_sandboxes(world: World) -> None:
    """Read the rule in force: with more sandboxes each has less, and an open connection stays."""
    world.inet.records["a.example"] = ["203.0.113.10"]

    def limit() -> int:
        command = ["nft", "list", "chain", "inet", "atoll", "admit"]
        text = world.call(world.egress._in_router(lambda: subprocess.run(command, capture_output=True, check=True)))
        return int(re.search(rb"ct count over (\d+)", text.stdout)[1])  # type: ignore[index]

    def table() -> int:
        with open("/proc/sys/net/netfilter/nf_conntrack_max", encoding="ascii") as handle:
            return int(handle.read())

    size = world.call(world.egress._in_router(table))
    with world.sandbox("a.example:5432") as box, box.connect("a.example", 5432) as sock:
        assert limit() <= size // 16
        with contextlib.ExitStack() as stack:
            for _ in range(70):
                stack.enter_context(world.sandbox())
            assert limit() == TableShare.of(size, 128).connections
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            with box.connect("a.example", 5432) as again:
                again.sendall(b"x")
                assert again.recv(1) == b"x"
