"""Files: the fields of the guest protocol, with `<name>_b64` beside each name that may be any bytes."""

from typing import Annotated

from msgspec import Meta

from atoll.model.fields import KIB, MIB, USER, Mode, Natural, Request


class FileRequest(Request, kw_only=True):
    """A file operation. `user`: whose rights decide, a name or number; unsaid, the agent's, which are root's."""

    user: str | None = None

    def __post_init__(self) -> None:
        if self.user is not None and not USER.match(self.user):
            raise ValueError("user must be a name or number, optionally with `:group`")


class ListFiles(FileRequest, kw_only=True):
    path: str = ""
    path_b64: str | None = None
    recursive: bool = False
    since: Annotated[float, Meta(ge=0, le=2**53)] | None = None
    depth: Natural | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    files_only: bool = False


class PathOnly(FileRequest, kw_only=True):
    path: str = ""
    path_b64: str | None = None


class StatFile(PathOnly, kw_only=True):
    follow: bool = True


class MakeDirectory(PathOnly, kw_only=True):
    """`uid`, `gid`: the owner of what is made."""

    parents: bool = False
    mode: Mode | None = None
    uid: Annotated[int, Meta(ge=0, le=65534)] | None = None
    gid: Annotated[int, Meta(ge=0, le=65534)] | None = None
    exist_ok: bool = False


class RemoveFile(PathOnly, kw_only=True):
    recursive: bool = False
    missing_ok: bool = False


class TwoPaths(FileRequest, kw_only=True):
    src: str = ""
    src_b64: str | None = None
    dst: str = ""
    dst_b64: str | None = None
    overwrite: bool = False


class MoveFile(TwoPaths, kw_only=True):
    pass


class CopyFile(TwoPaths, kw_only=True):
    recursive: bool = False


class ChangeMode(PathOnly, kw_only=True):
    mode: Mode | None = None
    uid: Annotated[int, Meta(ge=0, le=65534)] | None = None
    gid: Annotated[int, Meta(ge=0, le=65534)] | None = None
    recursive: bool = False
    follow: bool = True


class MakeLink(PathOnly, kw_only=True):
    target: str = ""
    target_b64: str | None = None


class Grep(PathOnly, kw_only=True):
    pattern: Annotated[str, Meta(min_length=1, max_length=64 * KIB)]
    recursive: bool = True
    ignore_case: bool = False
    include: list[str] = []
    exclude: list[str] = []
    max_matches: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_line_bytes: Annotated[int, Meta(ge=1, le=MIB)] | None = None


class Sed(FileRequest, kw_only=True):
    pattern: Annotated[str, Meta(min_length=1, max_length=64 * KIB)]
    replacement: Annotated[str, Meta(max_length=MIB)]
    files: list[str] | None = None
    path: str | None = None
    path_b64: str | None = None
    recursive: bool = True
    include: list[str] = []
    exclude: list[str] = []
    regex: bool = True
    first_only: bool = False
    ignore_case: bool = False
