"""Names of runs from what was typed: short, and never twice the same."""

from pathlib import Path

import pytest

from penstock.trace.compare.trace_study import name_runs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("monday/traces", "friday/traces"):
        (tmp_path / name).mkdir(parents=True)
        for rank in range(2):
            (tmp_path / name / f"trace-{rank}-of-2.pfw.gz").touch()
    (tmp_path / "one.darshan.txt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_a_run_of_its_name(here: Path) -> None:
    assert name_runs(["monday"]) == {"monday": ("monday",)}


def test_files_of_one_folder_are_one_run(here: Path) -> None:
    files = [f"monday/traces/trace-{rank}-of-2.pfw.gz" for rank in range(2)]
    assert name_runs(files) == {"traces": tuple(files)}


def test_a_single_file_is_called_without_its_endings(here: Path) -> None:
    assert name_runs(["one.darshan.txt"]) == {"one": ("one.darshan.txt",)}


def test_equal_names_are_told_apart_by_their_folders(here: Path) -> None:
    assert list(name_runs(["monday/traces", "friday/traces"])) == ["monday/traces", "friday/traces"]


def test_the_same_run_given_twice_is_read_once(here: Path) -> None:
    assert name_runs(["monday", "monday"]) == {"monday": ("monday", "monday")}


def test_a_glob_is_called_after_what_it_matches_in(here: Path) -> None:
    assert list(name_runs(["monday/traces/*.pfw.gz"])) == ["traces"]


def test_names_of_ones_own_come_first_and_join_what_they_are_given_to(here: Path) -> None:
    given = ["old=monday/traces", "new=friday/traces/*", "old=one.darshan.txt"]
    assert name_runs(given) == {"old": ("monday/traces", "one.darshan.txt"), "new": ("friday/traces/*",)}


def test_a_file_whose_name_has_an_equals_sign_is_a_file(here: Path) -> None:
    (here / "lr=3").mkdir()
    assert name_runs(["lr=3"]) == {"lr=3": ("lr=3",)}
