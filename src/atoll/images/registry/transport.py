"""HTTP to one registry: login, redirects, retries, and the rules about who may be spoken to.

Only HTTPS is spoken, except to loopback and to registries the operator calls insecure. The login goes to the registry
and its token service, never to a host that either redirects to; a registry cannot send us to this machine's own
services.
"""

import base64
import ipaddress
import json
import re
import ssl
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import SplitResult, urlencode, urljoin, urlsplit

import urllib3

from atoll.errors import AtollError, ImageError, InvalidArgument, NotFound, PermissionDenied, Unavailable
from atoll.images.registry.credentials import DockerConfig, Login
from atoll.images.registry.public import public_only
from atoll.images.registry.reference import Reference

ATTEMPTS = 5
_TIMEOUT = urllib3.Timeout(connect=10, read=60)
_REDIRECTS = 5
_TOKEN_BYTES = 1 << 20
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_UNREACHABLE = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_CHALLENGE_FIELD = re.compile(r'([A-Za-z_]+)="([^"]*)"')


class Transport:
    """Requests to one registry about one repository, as one user. May be used from several threads."""

    def __init__(
        self,
        reference: Reference,
        *,
        credentials: DockerConfig | None = None,
        insecure: Iterable[str] = (),
        ca_file: Path | None = None,
        public: bool = False,
    ) -> None:
        self._name = reference.registry
        self._repository = reference.repository
        self._credentials = credentials or DockerConfig()
        host = reference.api_host
        self._plain = host in frozenset(insecure) and not public
        self._loopback = _is_loopback(host) and not public
        context = ssl.create_default_context()
        if ca_file is not None:
            context.load_verify_locations(cafile=str(ca_file))
        self._http = urllib3.PoolManager(num_pools=8, maxsize=8, timeout=_TIMEOUT, retries=False, ssl_context=context)
        if public:
            public_only(self._http)
        self._base = f"https://{host}"
        self._scheme_known = not (self._plain or self._loopback)
        self._authorization: str | None = None
        self._lock = threading.RLock()

    def close(self) -> None:
        self._http.clear()

    def get(self, path: str, headers: dict[str, str], accept_range: bool = False) -> urllib3.BaseHTTPResponse:
        """A GET with login, retries and redirects; returns only good answers."""
        for attempt in range(ATTEMPTS):
            try:
                response = self._authorized(path, headers)
            except urllib3.exceptions.HTTPError as error:
                if _UNTRUSTED in str(error):
                    raise ImageError(
                        f"the certificate of {self._name} is not trusted: {reason(error)}",
                        hint="add the CA that signed it to the machine's bundle",
                    ) from error
                if attempt == ATTEMPTS - 1 or (isinstance(error, _UNREACHABLE) and attempt > 0):
                    raise Unavailable(f"cannot reach {self._name}: {reason(error)}") from error
                time.sleep(0.2 * 2**attempt)
                continue
            if response.status in (200, 206) or (accept_range and response.status == 416):
                return response
            status, body = response.status, _peek(response)
            if status in _RETRIED_STATUS and attempt < ATTEMPTS - 1:
                time.sleep(_retry_after(response, attempt))
                continue
            raise self._failure(status, body)
        raise Unavailable(f"{self._name} does not answer")

    def _authorized(self, path: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        self._find_scheme()
        used = self._authorization
        response = self._follow(urljoin(self._base, path), headers, used)
        if response.status != 401:
            return response
        challenge = response.headers.get("WWW-Authenticate", "")
        _peek(response)
        with self._lock:
            if self._authorization == used:  # another thread may have logged in meanwhile
                self._authorization = self._log_in(challenge)
        return self._follow(urljoin(self._base, path), headers, self._authorization)

    def _follow(self, url: str, headers: dict[str, str], authorization: str | None) -> urllib3.BaseHTTPResponse:
        """Follow redirects by hand: the login stays with the origin it was given to."""
        origin = _origin(urlsplit(self._base))
        for _ in range(_REDIRECTS):
            sent = {"User-Agent": "atoll", "Accept-Encoding": "identity", **headers}
            if authorization and _origin(urlsplit(url)) == origin:
                sent["Authorization"] = authorization
            response = self._http.request("GET", url, headers=sent, redirect=False, preload_content=False)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            location = response.headers.get("Location", "")
            _peek(response)
            url = urljoin(url, location)
            self._check_target(url)
        raise ImageError(f"{self._name} redirects in circles")

    def _check_target(self, url: str) -> None:
        """A registry may send us to another public server, not to this machine's own services."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme == "http" and not (self._plain or (self._loopback and _is_loopback(host))):
            raise ImageError(f"{self._name} redirects to an address without encryption")
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise ImageError(f"{self._name} redirects to an address that is not a web address")
        if not self._loopback and (_is_loopback(host) or _is_link_local(host)):
            raise ImageError(f"{self._name} redirects to an address of this machine")

    def _find_scheme(self) -> None:
        """Loopback and insecure registries are tried over TLS first; plain HTTP only if that is not spoken there."""
        with self._lock:
            if self._scheme_known:
                return
            host = self._base.partition("://")[2]
            try:
                self._http.request("GET", f"https://{host}/v2/", redirect=False, headers={"User-Agent": "atoll"})
            except urllib3.exceptions.HTTPError as error:
                if _UNTRUSTED not in str(error):
                    self._base = f"http://{host}"
            self._scheme_known = True

    # login

    def _log_in(self, challenge: str) -> str:
        login = self._credentials.login(self._name)
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "bearer":
            return f"Bearer {self._token(dict(_CHALLENGE_FIELD.findall(rest)), login)}"
        if scheme.lower() == "basic" and login is not None:
            return _basic(login)
        raise self._failure(401, b"", anonymous=login is None)

    def _token(self, fields: dict[str, str], login: Login | None) -> str:
        realm = fields.get("realm", "")
        self._check_target(realm)
        query = {"scope": f"repository:{self._repository}:pull"}
        if fields.get("service"):
            query["service"] = fields["service"]
        headers = {"User-Agent": "atoll", "Accept": "application/json"}
        if login is not None and login.identity_token:
            query |= {"grant_type": "refresh_token", "refresh_token": login.identity_token, "client_id": "atoll"}
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            response = self._http.request(
                "POST", realm, body=urlencode(query), headers=headers, redirect=False, preload_content=False
            )
        else:
            if login is not None:
                headers["Authorization"] = _basic(login)
            separator = "&" if urlsplit(realm).query else "?"
            url = f"{realm}{separator}{urlencode(query)}"
            response = self._http.request("GET", url, headers=headers, redirect=False, preload_content=False)
        try:
            raw = read_limited(response, _TOKEN_BYTES, "token")
        finally:
            response.release_conn()
        if response.status != 200:
            raise self._failure(response.status, raw, anonymous=login is None)
        try:
            answer = json.loads(raw)
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise ImageError(f"the token service of {self._name} gave no token")
        return token

    def _failure(self, status: int, body: bytes, anonymous: bool | None = None) -> AtollError:
        name, said = f"{self._name}/{self._repository}", _quote_error(body)
        if status in (401, 403):
            if anonymous is None:
                anonymous = self._credentials.login(self._name) is None
            hint = "the login may be wrong, or may not pull"
            if anonymous:
                hint = f"log in with `docker login {self._name}`"
            return PermissionDenied(f"{self._name} refuses access to {name}{said}", hint=hint)
        if status == 404:
            return NotFound(f"no such image at {name}{said}", hint="check the name and the tag")
        if status in _RETRIED_STATUS:
            return Unavailable(f"{self._name} answers {status}{said}", hint="try again later")
        if 300 <= status < 500:
            return InvalidArgument(f"{self._name} refuses the request with {status}{said}")
        return ImageError(f"{self._name} answers {status}{said}")


def read_limited(response: urllib3.BaseHTTPResponse, limit: int, what: str) -> bytes:
    try:
        raw = response.read(limit + 1, decode_content=False)
    except urllib3.exceptions.HTTPError as error:
        raise Unavailable(f"the registry broke off while sending the {what}: {reason(error)}") from error
    if len(raw) > limit:
        response.close()
        raise ImageError(f"the registry sent a {what} of more than {limit} bytes")
    return raw


def _peek(response: urllib3.BaseHTTPResponse) -> bytes:
    """The start of an answer that is not wanted, so that its connection can be used again."""
    try:
        body = response.read(1 << 14, decode_content=False)
        if response.read(1):
            response.close()
    except urllib3.exceptions.HTTPError:
        body = b""
    response.release_conn()
    return body


def _quote_error(body: bytes) -> str:
    """The registry's own words about an error, without anything that steers a terminal."""
    try:
        first = json.loads(body)["errors"][0]
        text = str(first.get("message") or first.get("code") or "")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ""
    return f" ({''.join(char if char.isprintable() else '?' for char in text[:200])})" if text else ""


def reason(error: BaseException) -> str:
    """Return an error's text without the names of objects in it."""
    text = str(error)
    return (text.partition("): ")[2] or text)[:300]


def _retry_after(response: urllib3.BaseHTTPResponse, attempt: int) -> float:
    header = response.headers.get("Retry-After", "")
    return min(float(header), 10.0) if header.isdigit() else 0.2 * 2**attempt


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.username}:{login.password}".encode()).decode()


def _origin(parts: SplitResult) -> tuple[str, str, int | None]:
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    name = host if host.count(":") > 1 else host.partition(":")[0]
    address = _address(name)
    return address.is_loopback if address is not None else name == "localhost" or name.endswith(".localhost")


def _is_link_local(host: str) -> bool:
    address = _address(host)
    return address is not None and (address.is_link_local or address.is_unspecified)
