"""Names of images: what a person types, and the one canonical form everything else uses.

`python:3.12`, `docker.io/library/python:3.12` and `index.docker.io/python:3.12` are the same image, and
`Reference.parse` gives them the same value. A reference names a registry, a repository, and a tag or a digest.
"""

import re
from dataclasses import dataclass

from atoll.errors import InvalidArgument

DEFAULT_REGISTRY = "docker.io"
DEFAULT_TAG = "latest"
MAX_LENGTH = 256

_ALLOWED = re.compile(r"[A-Za-z0-9._/:@-]+")
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[a-f0-9]{64}|sha512:[a-f0-9]{128}")
_HUB_NAMES = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com"})


def is_digest(text: str) -> bool:
    """Whether `text` is a content digest of a kind we can verify."""
    return _DIGEST.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Reference:
    """One image, fully named. `str()` is the canonical spelling."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Read what a person typed; anything doubtful is refused rather than guessed."""
        if not text or len(text) > MAX_LENGTH or _ALLOWED.fullmatch(text) is None:
            raise InvalidArgument(
                f"not an image reference: {text[:MAX_LENGTH]!r}",
                hint="an image is [registry/]repository[:tag][@digest], of letters, digits and . _ / : @ -",
            )
        rest, at, digest = text.partition("@")
        if at and not is_digest(digest):
            raise InvalidArgument(f"not a digest: {digest!r}", hint="a digest is sha256: and 64 hexadecimal digits")
        registry, rest = _split_registry(rest)
        repository, colon, tag = rest.partition(":")
        if colon and _TAG.fullmatch(tag) is None:
            raise InvalidArgument(f"not an image tag: {tag!r} in {text!r}")
        if registry == DEFAULT_REGISTRY and "/" not in repository:
            repository = f"library/{repository}"
        if _REPOSITORY.fullmatch(repository) is None:
            raise InvalidArgument(
                f"not an image repository: {repository!r} in {text!r}", hint="repository names are lower case"
            )
        if not colon:
            tag = "" if digest else DEFAULT_TAG
        return cls(registry, repository, tag or None, digest or None)

    @property
    def api_host(self) -> str:
        """The host that answers for this registry: Docker Hub's API lives under another name than its images."""
        return "registry-1.docker.io" if self.registry == DEFAULT_REGISTRY else self.registry

    @property
    def version(self) -> str:
        """Return the name to ask the registry for: the digest wherever there is one, because a tag can move."""
        return self.digest or self.tag or DEFAULT_TAG

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"


def _split_registry(text: str) -> tuple[str, str]:
    first, slash, rest = text.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        return DEFAULT_REGISTRY, text
    host = first.lower()
    if _DOMAIN.fullmatch(host) is None or _bad_port(host):
        raise InvalidArgument(f"not a registry: {first!r}", hint="a registry is a host name with an optional port")
    return (DEFAULT_REGISTRY if host in _HUB_NAMES else host), rest


def _bad_port(host: str) -> bool:
    _, colon, port = host.partition(":")
    return bool(colon) and not 0 < int(port) < 65536
