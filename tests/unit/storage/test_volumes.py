"""Free space is checked before the first byte, on file systems only."""

from pathlib import Path

import pytest

from penstock.errors import OutOfSpace
from penstock.storage.capabilities import find_local_root
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.volumes import nearest_folder, require_free_space


def test_what_fits_is_silent_and_what_does_not_names_the_place_and_the_way_out(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    require_free_space(root, 1, what="This", fix="write less")
    with pytest.raises(OutOfSpace, match=r"This takes 1 EiB, but only .* are free") as caught:
        require_free_space(root, 1 << 60, what="This", fix="write less")
    assert caught.value.where == str(tmp_path)
    assert caught.value.fix == "Make room, or write less."


def test_a_storage_without_a_folder_is_not_checked() -> None:
    require_free_space(find_local_root(MemoryStorage()), 1 << 60, what="This", fix="write less")


def test_the_nearest_folder_is_the_innermost_that_exists(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path) == tmp_path
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
