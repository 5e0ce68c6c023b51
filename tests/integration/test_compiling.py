"""Machine code from the cache: found again, safe when processes start at once, dispensable when it fails."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest

from penstock.compiling import compile_loop

PROGRAM = """
import sys
from penstock.dataset.content import Content
buffer = bytearray(8192)
Content(1, 2).fill(memoryview(buffer))
assert Content(1, 2).verify(memoryview(buffer)) is None
sys.stdout.write(buffer[-8:].hex())
"""


def double(number: int) -> int:
    return number + number


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def doubled(folder: Path) -> None:
    loop = compile_loop(double, "int64(int64)", {"XDG_CACHE_HOME": str(folder)})
    assert loop(21) == 42


def test_a_loop_is_kept_and_found_again(folder: Path) -> None:
    doubled(folder)
    before = {path: path.stat().st_mtime_ns for path in files_in(folder)}
    assert any(path.suffix == ".nbc" for path in before)
    doubled(folder)
    assert {path: path.stat().st_mtime_ns for path in files_in(folder)} == before


def test_only_its_owner_may_change_what_will_be_run(folder: Path) -> None:
    doubled(folder)
    (loops,) = (folder / "penstock").iterdir()
    assert loops.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.parametrize("where", [".", "penstock", "penstock/loops"])
def test_a_cache_that_others_may_change_is_not_used(
    folder: Path, where: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    doubled(folder)
    (loops,) = (folder / "penstock").iterdir()
    changed = loops if where.endswith("loops") else folder / where
    for path in list(files_in(folder)):
        path.unlink()
    changed.chmod(mode)
    doubled(folder)
    assert list(files_in(folder)) == []
    assert f"others may write to {changed}" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("where", ["penstock"])
def test_a_cache_of_another_user_is_not_used(
    folder: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "penstock").mkdir(parents=True)
    os.chown(folder / where, 65534, 65534)
    doubled(folder)
    assert list(files_in(folder)) == []
    assert "belongs to user 65534" in caplog.text


@pytest.mark.parametrize("where", ["penstock", "penstock/loops"])
def test_a_link_in_the_place_of_the_cache_is_not_followed(
    folder: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    doubled(folder)
    (loops,) = (folder / "penstock").iterdir()
    linked = loops if where.endswith("loops") else folder / where
    linked.rename(folder / "elsewhere")
    linked.symlink_to(folder / "elsewhere")
    for path in list(files_in(folder)):
        path.unlink()
    doubled(folder)
    assert list(files_in(folder)) == []
    assert "or it is a link" in caplog.text


def test_a_user_whose_group_may_write_has_a_cache_that_it_may_not(folder: Path) -> None:
    umask = os.umask(0o002)
    try:
        doubled(folder)
    finally:
        os.umask(umask)
    assert any(path.suffix == ".nbc" for path in files_in(folder))
    (loops,) = (folder / "penstock").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (folder / "penstock", loops)] == [0o700] * 2


def test_the_compiler_keeps_its_own_cache_folder_for_others(folder: Path) -> None:
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]  # made when numba is imported
    doubled(folder)
    assert before == numba.config.CACHE_DIR  # type: ignore[attr-defined]  # likewise


@pytest.mark.parametrize("suffix", [".nbc", ".nbi"])
@pytest.mark.parametrize("kept_bytes", [0, 40])
def test_a_cache_cut_short_by_a_crash_costs_a_warning_that_names_it(
    folder: Path, suffix: str, kept_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    doubled(folder)
    for path in files_in(folder):
        if path.suffix == suffix:
            os.truncate(path, kept_bytes)
    with caplog.at_level(logging.WARNING):
        doubled(folder)
    (record,) = caplog.records
    assert "delete" in record.getMessage()
    assert str(folder) in record.getMessage()


def test_a_place_where_no_folder_can_be_made_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    doubled(tmp_path / "file")
    assert "cache folder" in caplog.text


def test_a_user_without_a_home_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert compile_loop(double, "int64(int64)", {})(4) == 8
    assert "home" in caplog.text


def test_a_folder_that_cannot_be_written_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    doubled(folder)
    assert list(files_in(folder)) == []


def test_processes_that_start_at_once_on_an_empty_cache_all_make_the_same_bytes(folder: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * 4, said
    assert {errors for _, errors in said} == {b""}
    assert len({output for output, _ in said}) == 1
    assert not [path for path in files_in(folder) if ".tmp." in path.name]
