"""Other people's loaders and readers: found by the names of their packages' entry points."""

from importlib import invalidate_caches
from pathlib import Path

import pytest

from penstock.errors import Unavailable, UsageError
from penstock.workload.entry_points import Extension, installed_extensions, load_extension


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as pip would have installed it."""
    (tmp_path / "own_parts.py").write_text(
        "def options(workload, threads):\n    return (workload, threads)\n"
    )
    facts = tmp_path / "own_parts-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[penstock.loaders]\nmine = own_parts:options\nbroken = own_parts:missing\n"
        "[penstock.readers]\nfolded = not_there:Format\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    invalidate_caches()
    return tmp_path


@pytest.mark.usefixtures("package")
def test_what_packages_offer_is_found_by_name() -> None:
    assert {"mine", "broken"} <= set(installed_extensions(Extension.LOADER))
    assert load_extension(Extension.LOADER, "mine", where="--loader")("w", 3) == ("w", 3)


@pytest.mark.usefixtures("package")
def test_an_unknown_name_lists_what_there_is_and_how_to_add_to_it() -> None:
    with pytest.raises(UsageError, match=r"'min'.*--loader.*native.*mine.*penstock\.loaders"):
        load_extension(Extension.LOADER, "min", where="--loader", own=("native",))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [(Extension.LOADER, "broken", "own_parts:missing"), (Extension.READER, "folded", "not_there")],
)
def test_a_package_that_cannot_be_loaded_says_why(kind: Extension, name: str, said: str) -> None:
    with pytest.raises(Unavailable, match=said):
        load_extension(kind, name, where="--x")


def test_without_packages_there_are_none() -> None:
    with pytest.raises(UsageError, match=r"reader.*none"):
        load_extension(Extension.READER, "mine", where="--x")
