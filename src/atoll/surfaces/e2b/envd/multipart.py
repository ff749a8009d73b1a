"""multipart/form-data as it comes: the parts named `file`, each with its name and its bytes. Nothing is held but a boundary."""

import re
from collections.abc import AsyncIterator

from atoll import errors

MAX_HEAD = 16 * 1024  # of one part
MAX_PARTS = 10_000
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^;\s]{1,200}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(rb'[;\s]filename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def boundary_of(content_type: str) -> bytes:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise errors.InvalidArgument("multipart/form-data needs a boundary")
    return (found[1] or found[2]).encode("latin-1")


class Parts:
    """Reads parts from a body. `parts` yields a name; its bytes are then read with `data` before the next name."""

    def __init__(self, body: AsyncIterator[bytes], boundary: bytes) -> None:
        self._body = body
        self._line = b"--" + boundary
        self._held = bytearray(b"\r\n")  # so that the first boundary has a line's end before it, as all others have

    async def parts(self) -> AsyncIterator[str]:
        """The file names of the parts named `file`; others are passed over."""
        async for _ in self.data():
            pass  # what is before the first boundary
        for _ in range(MAX_PARTS):
            while len(self._held) < 2:
                await self._more()
            if self._held[:2] == b"--":
                async for _ in self._body:
                    pass  # what is after the last boundary
                return
            head = await self._head()
            name = _NAME.search(head)
            file = _FILENAME.search(head)
            if name is not None and name[1] == b"file":
                yield _plain(file[1]) if file is not None else ""
            async for _ in self.data():
                pass
        raise errors.InvalidArgument(f"more than {MAX_PARTS} parts")

    async def _head(self) -> bytes:
        while (end := self._held.find(b"\r\n\r\n")) < 0:
            if len(self._held) > MAX_HEAD:
                raise errors.InvalidArgument("the head of a part is too long")
            await self._more()
        head = bytes(self._held[:end])
        del self._held[: end + 2]  # the last line's end stays: a part may be empty
        if not self._held.startswith(b"\r\n"):
            raise errors.InvalidArgument("the body is not multipart/form-data")
        self._begun = True
        return head

    _begun = False  # a head was read and nothing of its part yet

    async def data(self) -> AsyncIterator[bytes]:
        """The bytes of this part; again once it is read: nothing."""
        mark = b"\r\n" + self._line
        skip = 2 if self._begun else 0
        if self._over and not self._begun:
            return
        self._begun = False
        self._over = False
        while True:
            at = self._held.find(mark)
            if at >= 0:
                if piece := bytes(self._held[skip:at]):
                    yield piece
                del self._held[: at + len(mark)]
                self._over = True
                return
            sure = len(self._held) - len(mark)
            if sure > skip:
                piece = bytes(self._held[skip:sure])
                del self._held[:sure]
                skip = 0
                yield piece
            await self._more()

    _over = False  # this part's bytes have been read

    async def _more(self) -> None:
        try:
            self._held += await anext(self._body)
        except StopAsyncIteration:
            raise errors.InvalidArgument("the body ends in the middle of a part") from None


def _plain(name: bytes) -> str:
    """Return a file's name. The SDKs write `"` as `%22`, and one of them doubles backslashes; the rest is as it is."""
    return name.replace(b"%22", b'"').replace(b"\\\\", b"\\").decode("utf-8", "surrogateescape")
