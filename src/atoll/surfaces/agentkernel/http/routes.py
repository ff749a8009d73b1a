"""The daemon's route that opens agentkernel's port."""

from atoll import errors, model
from atoll.core.policy.profiles import OPEN, Ceiling
from atoll.server import frames
from atoll.server.request import Exchange
from atoll.server.routes import Rest, route


@route(
    "POST",
    "/v1/agentkernel",
    "Serve agentkernel's HTTP interface while this request is open",
    model.OpenAgentkernel,
    scope="local",
)
async def open_agentkernel(rest: Rest, exchange: Exchange) -> None:
    from atoll.server.tcp import is_loopback, listening
    from atoll.surfaces.agentkernel.http.admission import Admission
    from atoll.surfaces.agentkernel.http.app import Agentkernel
    from atoll.surfaces.agentkernel.http.table import Settings

    request = await exchange.json(model.OpenAgentkernel)
    if not request.key and not is_loopback(request.host):
        raise errors.PermissionDenied(
            f"{request.host} can be reached from other machines: that needs a key",
            hint="set AGENTKERNEL_API_KEY, or listen on 127.0.0.1",
        )
    ceiling = OPEN if request.allow_host_access else Ceiling(any_host=request.any_host)
    admission = Admission(request.host, request.key)
    settings = Settings(admission, ceiling, request.any_host, request.legacy_exit_errors, request.runtime)
    await frames.send(exchange, listening(Agentkernel(rest.core, settings), request.host, request.port))
