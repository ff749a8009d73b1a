"""The code interpreter of the contract: port 49999 leads to the server of real Jupyter kernels inside the sandbox.

The server (`images/interpreter/inside/server.py`) speaks the contract itself. Here is who may come in, and that it runs.
"""

from collections.abc import Iterable, Mapping

from atoll.core.access.principals import Principal
from atoll.core.interpreter.serving import PORT as PORT
from atoll.core.policy.images import INTERPRETER
from atoll.core.sandboxes.state import Live
from atoll.surfaces.e2b.replies import WireError
from atoll.surfaces.e2b.served import Served

_ACCESS = b"x-access-token"


def check_token(app: Served, sandbox: str, headers: Iterable[tuple[bytes, bytes]], shown: bool) -> None:
    """Raise 403 without one of the sandbox's two tokens: code is run here, so no setting makes this port public."""
    if shown:
        return
    token = next((value for name, value in headers if name == _ACCESS), b"").decode("latin-1")
    if not token or not app.tokens.fits("envd", sandbox, token):
        raise WireError(403, "the interpreter needs the sandbox's traffic access token")


def variables(sandbox: str) -> Mapping[str, str]:
    """Return the variables that processes of this surface have besides the sandbox's own."""
    return {"E2B_SANDBOX_ID": sandbox}


async def prepare(app: Served, who: Principal, live: Live | None) -> None:
    """Have the kernels' server ready in a sandbox of the interpreter's template; elsewhere the port is like any other."""
    if live is not None and live.spec.image == INTERPRETER:
        await app.core.interpreters.ready(who, live.id, variables(live.id))
