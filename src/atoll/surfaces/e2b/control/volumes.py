"""Volumes: make, list, show and remove. Their files are reached through sandboxes that have them."""

from typing import Annotated

from msgspec import Meta, Struct

from atoll import errors
from atoll.model import ChangeMode, CreateSandbox, CreateVolume, SandboxInfo, VolumeInfo, convert
from atoll.server.request import Exchange
from atoll.surfaces.e2b.control.table import body_of, route
from atoll.surfaces.e2b.replies import WireError, nothing
from atoll.surfaces.e2b.served import Served

ANYBODYS = 0o777  # a volume's own directory: programs run as `user`, and the volume is its owner's alone


class _New(Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=63)]


def _shown(app: Served, volume: VolumeInfo) -> dict[str, object]:
    return {
        "volumeID": volume.id, "name": volume.name, "token": app.tokens.make("volume", volume.id),
        "domain": app.settings.domain,
    }  # fmt: skip


@route("POST", "volumes")
async def create(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, _New)
    made = await app.core.volumes.create(exchange.who, convert(CreateVolume, {"name": asked.name}))
    await exchange.answer(_shown(app, made), 201)


@route("GET", "volumes")
async def list_volumes(app: Served, exchange: Exchange) -> None:
    found = await app.core.volumes.list(exchange.who)
    await exchange.answer([{"volumeID": one.id, "name": one.name} for one in found])


@route("GET", "volumes/*")
async def get(app: Served, exchange: Exchange) -> None:
    await exchange.answer(_shown(app, await app.core.volumes.get(exchange.who, exchange.parts[1])))


@route("DELETE", "volumes/*")
async def remove(app: Served, exchange: Exchange) -> None:
    await app.core.volumes.remove(exchange.who, exchange.parts[1])
    await nothing(exchange)


for _method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
    for _place in ("path", "dir", "file"):

        @route(_method, f"volumecontent/*/{_place}")
        async def _content(app: Served, exchange: Exchange) -> None:
            raise WireError(501, "files of a volume are reached through a sandbox that has it: use volume_mounts")


async def open_volumes(app: Served, exchange: Exchange, info: SandboxInfo, spec: CreateSandbox) -> None:
    """Let every user of a new sandbox write to its volumes; without that only root could."""
    try:
        for volume in spec.volumes:
            change = ChangeMode(path=volume.target, mode=ANYBODYS, user="0")
            await app.core.files.ask(exchange.who, info.id, "chmod", change)
    except errors.AtollError:
        await app.core.sandboxes.destroy(exchange.who, info.id)
        raise
