"""The gRPC gateway: one call in a live session, over TLS and over the Unix socket, and sixty-four clients at once."""

import asyncio
import os
import time
from functools import partial
from pathlib import Path

from atoll import AsyncSandboxClient, SandboxClient
from bench import programs
from bench.lab import Lab
from bench.measure import Contender

CLIENTS = 64
SECONDS = 60.0


def exec_true(lab: Lab) -> list[Contender]:
    found = [Contender("bare subprocess", programs.bare(["/bin/true"]))]
    for runtime in lab.runtimes:
        for way, endpoint in _endpoints(lab).items():
            client = _client(lab, endpoint)
            session = client.create_session(runtime, [])
            lab.row.callback(client.close)
            lab.row.callback(client.destroy_session, session)
            found.append(Contender(f"atoll {runtime}, {way}", partial(_true, client, session)))
    return found


def _true(client: SandboxClient, session: str) -> None:
    answer = client.exec(session, "/bin/true")
    if answer.exit_code != 0:
        raise RuntimeError(answer.stderr)


def _endpoints(lab: Lab) -> dict[str, str]:
    return {
        "TLS": Path(lab.home, "grpc.endpoint").read_text().split()[0],
        "Unix socket": f"unix:{lab.home}/grpc.sock",
    }


def _client(lab: Lab, endpoint: str) -> SandboxClient:
    os.environ["ATOLL_HOME"] = lab.home  # where a local client finds the gateway's certificate
    return SandboxClient(endpoint)


def crowd(lab: Lab, figure: str) -> list[Contender]:
    """Clients with a channel each, eight sessions between them, each call waiting for its answer."""
    figures: dict[str, float] = lab.once("grpc crowd", dict)

    def both() -> float:
        if not figures:
            figures.update(asyncio.run(_load(lab, 5.0 if lab.quick else SECONDS)))
        return float(figures[figure])

    return [Contender("atoll", both)]


async def _load(lab: Lab, seconds: float) -> dict[str, float]:
    os.environ["ATOLL_HOME"] = lab.home
    endpoint = _endpoints(lab)["TLS"]
    clients = [AsyncSandboxClient(endpoint) for _ in range(CLIENTS)]
    sessions = [await clients[0].create_session("container", []) for _ in range(8)]
    times: list[float] = []
    errors: list[str] = []
    start = time.perf_counter()

    async def client(number: int) -> None:
        while time.perf_counter() - start < seconds:
            begun = time.perf_counter()
            try:
                answer = await clients[number].exec(sessions[number % len(sessions)], "/bin/true")
                if answer.exit_code != 0:
                    errors.append(answer.stderr)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            times.append(time.perf_counter() - begun)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    took = time.perf_counter() - start
    for session in sessions:
        await clients[0].destroy_session(session)
    for one in clients:
        await one.close()
    if errors:
        print(f"gRPC crowd: {errors[0]}")
    return {"errors": len(errors), "rate": len(times) / took, "p50": sorted(times)[len(times) // 2]}
