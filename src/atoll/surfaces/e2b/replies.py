"""Answers in the contract's form, and what its clients are told to do after an error."""

from collections.abc import Mapping
from urllib.parse import parse_qsl

from atoll import errors
from atoll.server.request import Exchange

Headers = tuple[tuple[bytes, bytes], ...]


class WireError(errors.AtollError):
    """An error whose status, and name where it has one, the contract gives."""

    def __init__(self, status: int, message: str, name: str = "", *, more: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"code": status, "message": message, **({"error_code": name} if name else {}), **(more or {})}


async def nothing(exchange: Exchange) -> None:
    await exchange.start(204, [])
    await exchange.end()


async def fail(exchange: Exchange, error: errors.AtollError) -> None:
    """Answer an error in the form of control plane and envd's REST."""
    if isinstance(error, WireError):
        status, body = error.status, error.body
    else:
        text = error.message + (f" ({error.hint})" if error.hint else "")
        status, body = error.http_status, {"code": error.http_status, "message": plain(text)}
    headers: Headers = ()
    if isinstance(error, errors.RateLimited):
        headers = ((b"should-retry", b"true"), (b"retry-after", b"1"))
    elif status in (429, 502, 503, 504):
        headers = ((b"should-retry", b"false"),)
    await exchange.answer(body, status, headers)


def plain(text: str) -> str:
    """Return text that JSON can carry, whatever a guest or a caller put into it."""
    return text.encode("utf-8", "replace").decode()


def query_of(exchange: Exchange) -> dict[str, str]:
    """Return the query's parameters; a space may be `+` or `%20`. Bytes that are not UTF-8 are surrogates."""
    raw = exchange.scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(raw, keep_blank_values=True, errors="surrogateescape", max_num_fields=100))
    except ValueError:
        raise errors.InvalidArgument("the query has too many parameters") from None
