"""Stores a layer while it is written: the writer in a thread of its own, a pipe between the two."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from atoll.images.layers.layers import Layer, LayerStore


def add_written(layers: LayerStore, produce: Callable[[BinaryIO], None]) -> Layer:
    """Store what `produce` writes. Its error is raised here, and nothing is kept then."""
    reader, writer = os.pipe()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            with os.fdopen(writer, "wb") as out:
                produce(out)
        except BaseException as error:  # told below
            failed.append(error)

    thread = threading.Thread(target=write, name="layer", daemon=True)
    thread.start()

    def check(_tree: Path) -> None:
        thread.join()
        if failed:
            raise failed[0]

    try:
        with os.fdopen(reader, "rb") as source:
            return layers.add(source, None, lambda _: None, check)
    except BaseException:
        thread.join()  # it ends at the closed pipe
        if failed and not isinstance(failed[0], BrokenPipeError):
            raise failed[0] from None
        raise
