"""Pages of a list. A token is the place of the last entry: its time and its name."""

import base64
from collections.abc import Callable
from typing import TypeVar

from atoll import errors
from atoll.server.request import whole

PAGE = 100
Place = tuple[float, str]
Headers = tuple[tuple[bytes, bytes], ...]
T = TypeVar("T")


def page_of(
    found: list[T], query: dict[str, str], place: Callable[[T], Place], *, newest_first: bool = True
) -> tuple[list[T], Headers]:
    """Return the page that a query asks for, and the header with the token of the next one, if there is one."""
    limit = whole(query, "limit", PAGE, 1, PAGE)
    found = sorted(found, key=place, reverse=newest_first)
    if query.get("nextToken"):
        last = _read_token(query["nextToken"])
        found = [one for one in found if (place(one) < last if newest_first else place(one) > last)]
    more = ((b"x-next-token", _token(place(found[limit - 1]))),) if len(found) > limit else ()
    return found[:limit], more


def _token(place: Place) -> bytes:
    return base64.urlsafe_b64encode(f"{place[0]!r} {place[1]}".encode())


def _read_token(text: str) -> Place:
    try:
        at, _, name = base64.b64decode(text.encode(), b"-_", validate=True).decode().partition(" ")
        return float(at), name
    except ValueError:
        raise errors.InvalidArgument("this nextToken was not made here") from None
