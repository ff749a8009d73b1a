"""atoll's own tool: a cell in the code interpreter. What it draws comes back as images."""

import base64
import binascii
from collections.abc import Mapping

import msgspec
from msgspec import Raw, UnsetType

from atoll.core.interpreter.verbs import text_of
from atoll.model import CellOutcome, CellResult, RunCell
from atoll.surfaces.mcp import content, tools
from atoll.surfaces.mcp.client import Call, given, tool
from atoll.words import k8e_ids as ids

MOST_IMAGES = 8  # of one cell
MOST_IMAGE = 4 * 1024 * 1024  # base64 characters of one; a larger one is named, not sent
TEXTS = ("markdown", "latex", "json", "svg", "html")  # the first that is there stands for a value without a text


@tool("sandbox_interpreter")
async def use_interpreter(call: Call, asked: tools.UseInterpreter) -> content.Result:
    named = given(asked.session_id)
    ref = ids.session_ref(named) if named is not None else await call.client.interpreter_sandbox()
    cell = RunCell(code=asked.code, language=asked.language, timeout_ms=asked.timeout * 1000)
    done = await call.core.interpreter.run(call.who, ref, cell)
    images: list[Mapping[str, object]] = []
    notes: list[str] = []
    for result in done.results:
        for image in _images(result):
            if len(images) < MOST_IMAGES and len(str(image["data"])) <= MOST_IMAGE:
                images.append(image)
            else:
                notes.append("an image was left out: a cell shows at most 8, of 3 MiB each")
    values = [shown for result in done.results if (shown := _text(result)) is not None]
    fields: dict[str, object] = {
        "values": [content.cut(one) for one in values],
        "stdout": content.cut(done.stdout),
        "stderr": content.cut("\n".join([*([done.stderr] if done.stderr else []), *notes])),
        "execution_count": done.execution_count,
        "timed_out": done.timed_out,
        "truncated": done.truncated,
        "images": len(images),
    }
    if done.error is not None:
        fields["error"] = {
            "name": done.error.name,
            "value": done.error.value,
            "traceback": content.cut(done.error.traceback),
        }
    answer = content.values(msgspec.to_builtins(fields), is_error=_failed(done))
    answer["content"].extend(images)
    return answer


def _failed(done: CellOutcome) -> bool:
    return done.error is not None or done.timed_out


def _images(result: CellResult) -> list[Mapping[str, object]]:
    """Return the images of a value; what is not base64 of an image is none, whatever the sandbox calls it."""
    found: list[Mapping[str, object]] = []
    for value in (result.png, result.jpeg):
        text = text_of(value)
        if not text:
            continue
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            continue
        if (kind := content.image_type(raw)) is not None:
            found.append({"type": "image", "data": text, "mimeType": kind})
    return found


def _text(result: CellResult) -> str | None:
    if (text := text_of(result.text)) is not None:
        return text
    for name in TEXTS:
        value: Raw | UnsetType = getattr(result, name)
        if not isinstance(value, UnsetType):
            return text_of(value) or bytes(value).decode("utf-8", "replace")
    return None
