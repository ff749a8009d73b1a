"""A pod is activated once, by its gateway, and is a sandbox from then on."""

import asyncio
import re
import socket
from typing import Any

import pytest
from lab.pods import CLAIM, GATEWAY, POD, POD_UID, PORT, Pod

from atoll import errors
from atoll.backends.kubernetes.channel import AGENT, GatewayKey, Refused, dial
from atoll.guest import GuestClient, Process


async def run(client: GuestClient, name: str, *argv: str) -> bytes:
    """Run a program to its end and return its output."""
    process = await Process.start(client, name, {"argv": list(argv)})
    output = b"".join([data async for _, data in process])
    assert process.exit is not None and process.exit.code == 0, output
    return output


async def test_an_activated_pod_is_a_sandbox(pod: Pod) -> None:
    """The first line of the log names the agent; after one order programs run with the claim's environment."""
    assert re.fullmatch(r"atoll-agent [0-9.]+ [0-9a-f]{64}\n", pod.line)
    before = await pod.order({"op": "status"})
    assert before["activated"] is False and before["claim"] is None
    answer = await pod.order(pod.activation())
    assert answer["again"] is False and answer["resolver"] is True
    assert [canary["outcome"] for canary in answer["canaries"]] == ["refused"]
    client = pod.client()
    assert await run(client, "a", "/bin/sh", "-c", "echo $FROM_CLAIM") == b"yes\n"
    blob = await run(client, "b", "/bin/sh", "-c", "head -c 5000000 /dev/zero")  # more than any window or buffer
    assert len(blob) == 5_000_000 and not any(blob)
    await client.upload("write", b"x" * 3_000_000, path="/dev/shm/atoll-pod-test")
    assert (
        await run(client, "c", "/usr/bin/wc", "-c", "/dev/shm/atoll-pod-test") == b"3000000 /dev/shm/atoll-pod-test\n"
    )
    await client.request("remove", path="/dev/shm/atoll-pod-test")
    assert (await pod.order({"op": "status"}))["claim"] == CLAIM
    await client.request("shutdown", reason="test")
    assert pod.ended() == 0
    await client.close()


async def test_processes_outlive_their_gateway(pod: Pod) -> None:
    """A second gateway with the same key replaces the first one, and finds what it had started."""
    await pod.order(pod.activation())
    first, second = pod.client(), pod.client()
    await first.request("exec", id="long", argv=["/bin/sh", "-c", "sleep 0.5; echo done"], detach=True)
    boot = first.agent["boot"]
    assert (await second.request("poll", id="long"))["running"] in (True, False)
    assert second.agent["boot"] == boot
    attached = await Process.attach(second, "long")
    assert b"".join([data async for _, data in attached]) == b"done\n"
    await first.close()
    await second.close()


async def test_activation_happens_once(pod: Pod) -> None:
    """The same claim is answered as done, another is refused and logged, whatever else the orders say."""
    await pod.order(pod.activation())
    again = await pod.order(pod.activation(boot={"nonsense": True}, canaries=[]))
    assert again["again"] is True
    for change in ({"claim": "another"}, {"pod": "another"}):
        with pytest.raises(Refused) as refused:
            await pod.order(pod.activation(**change))
        assert refused.value.reason == "other_claim"
    assert (await pod.order({"op": "status"}))["refused"] == 2
    assert pod.process.stdout is not None
    assert "refused the activation for claim another" in pod.process.stdout.readline()
    client = pod.client()
    assert await run(client, "a", "/bin/echo", "alive") == b"alive\n"
    await client.close()


async def test_two_gateways_at_once_activate_once(pod: Pod) -> None:
    """Of orders that come together, one is carried out; the others of the same claim are answered as done."""
    answers = await asyncio.gather(*(pod.order(pod.activation()) for _ in range(4)))
    assert sorted(answer["again"] for answer in answers) == [False, True, True, True]


async def test_a_pod_with_an_open_network_is_not_activated(pod: Pod) -> None:
    """A canary that connects keeps the pod from being used; when the way is shut it can be used."""
    with socket.create_server((GATEWAY, 0)) as listener:
        canaries = [{"host": GATEWAY, "port": 9}, {"host": GATEWAY, "port": listener.getsockname()[1]}]
        seen = await pod.order({"op": "canary", "canaries": canaries})
        assert seen["open"] is True and [one["outcome"] for one in seen["canaries"]] == ["refused", "connected"]
        with pytest.raises(Refused) as refused:
            await pod.order(pod.activation(canaries=canaries))
        assert refused.value.reason == "egress_open" and str(canaries[1]["port"]) in refused.value.message
    assert (await pod.order({"op": "status"}))["activated"] is False
    assert (await pod.order(pod.activation(canaries=canaries)))["again"] is False


async def test_a_canary_may_connect_for_a_moment(pod: Pod) -> None:
    """An enforcer needs a moment for a new pod: the dials are repeated before the answer."""
    listener = socket.create_server((GATEWAY, 0))
    asyncio.get_running_loop().call_later(1.0, listener.close)
    answer = await pod.order(pod.activation(canaries=[{"host": GATEWAY, "port": listener.getsockname()[1]}]))
    assert [canary["outcome"] for canary in answer["canaries"]] == ["refused"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"op": "reboot"}, "bad_request"),
    ({"claim": ""}, "bad_request"),
    ({"claim": "a/b"}, "bad_request"),
    ({"pod": 5}, "bad_request"),
    ({"extra": 1}, "bad_request"),
    ({"boot": []}, "bad_request"),
    ({"boot": {"host_secret": "short", "agent_secret": "0" * 32}}, "bad_request"),
    ({"boot": {"host_secret": "0" * 32, "agent_secret": "0" * 32, "listen_fd": 0}}, "bad_request"),
    ({"boot": {"host_secret": "0" * 32, "agent_secret": "0" * 32, "rlimits": {"x": [1, 1]}}}, "bad_request"),
    ({"canaries": []}, "bad_request"),
    ({"canaries": [{"host": "localhost", "port": 1}]}, "bad_request"),
    ({"canaries": [{"host": "127.0.0.1", "port": 1}]}, "bad_request"),
    ({"canaries": [{"host": GATEWAY, "port": 0}]}, "bad_request"),
    ({"canaries": [{"host": GATEWAY, "port": 9}] * 9}, "bad_request"),
    ({"unrestricted": "yes"}, "bad_request"),
    ({"v": 2}, "wrong_version"),
]


async def test_bad_orders_change_nothing(pod: Pod) -> None:
    """Every wrong order is refused by name, and the next right one is carried out."""
    for change, reason in BAD:
        with pytest.raises(Refused) as refused:
            await pod.order(pod.activation(**change))
        assert refused.value.reason == reason, change
    assert (await pod.order(pod.activation(canaries=[], unrestricted=True)))["again"] is False


async def test_a_limit_that_cannot_be_set_ends_the_pod(pod: Pod) -> None:
    """A sandbox without a limit that was asked for must not run: the pod is used up."""
    order = pod.activation()
    order["boot"]["rlimits"] = {"nofile": [2**40, 2**40]}
    with pytest.raises(Refused) as refused:
        await pod.order(order)
    assert refused.value.reason == "failed"
    assert pod.ended() == 1


async def test_a_gateway_speaks_with_no_other_agent(pod: Pod) -> None:
    """The fingerprint decides whom the gateway trusts, and the channels are shut before activation."""
    key = GatewayKey.generate()
    with pytest.raises(errors.Internal, match="not the agent of this pod"):
        await dial(pod.key, POD, PORT, "0" * 64, AGENT)
    with pytest.raises(errors.PermissionDenied):
        await pod.order({"op": "status"}, key)
    reader, writer = await dial(pod.key, POD, PORT, pod.fingerprint, AGENT)
    assert await reader.read() == b""
    writer.close()


def test_secrets_are_derived_and_differ() -> None:
    """A fixed vector, so that gateways of two versions agree; other claims, pods and sides have other secrets."""
    raw = bytes(range(32))
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = GatewayKey(Ed25519PrivateKey.from_private_bytes(raw))
    assert key.hello_secret("claim", "pod", "host") == "1d1456c806e37b7541c86fd4ac007e7e"
    others = {
        key.hello_secret(*which) for which in (("claim", "pod", "agent"), ("claim", "po", "host"), ("c", "pod", "host"))
    }
    assert len(others | {key.hello_secret("claim", "pod", "host")}) == 4
    assert POD_UID != CLAIM
