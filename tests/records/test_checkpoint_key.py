"""The key that seals saved memory: one that is not whole seals nothing."""

from pathlib import Path

import pytest

from atoll.core.workspaces.checkpoint_shelf import CheckpointShelf
from atoll.errors import Internal


def test_a_cut_key_is_an_error_and_never_a_key(tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path)
    (tmp_path / "memory.key").write_bytes(b"")
    with pytest.raises(Internal, match="not whole"):
        shelf.key_of("owner")
    (tmp_path / "memory.key").unlink()
    assert len(shelf.key_of("owner")) == 32 and shelf.key_of("owner") != shelf.key_of("other")
