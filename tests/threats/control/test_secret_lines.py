"""F2-L1: a secret with several lines stands in no transcript, however its output is cut into pieces."""

import pytest
from lab.principals import AGENT

from atoll.core import Core
from atoll.core.commands.history import MAX_LINE
from atoll.model import CreateSandbox

PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nAbCdEfGhIjKlMnOpQrStUvWx\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize("piece", [1, 7, 40, 10_000])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\\n", " "])
@pytest.mark.parametrize("before", [0, MAX_LINE - 5])
async def test_no_line_of_a_secret_is_recorded(core: Core, piece: int, newline: str, before: int) -> None:
    box = await core.sandboxes.create(AGENT, CreateSandbox())
    core.history.mask(box.id, [PEM, "single-line-secret"])
    writer = core.history.writer(box.id, "c1")
    data = ("x" * before + PEM.replace("\n", newline) + "single-line-secret and text\nnext\n").encode()
    for start in range(0, len(data), piece):
        writer.output("o", data[start : start + piece])
    writer.close()
    text = core.history.window(box.id, 0, 0)["output"]
    joined = "".join(line.split(" ", 3)[3] for line in text.splitlines())
    for line in [*PEM.splitlines()[1:3], "single-line-secret"]:
        assert line not in text and line not in joined and line[:20] not in text
    assert "and text" in text and text.endswith(" next\n")
