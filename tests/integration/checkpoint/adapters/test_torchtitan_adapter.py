from typing import Any

import pytest
from tests.integration.checkpoint.adapters.peers import Programs

WAYS = ["ours", "async", "pinned", "stock_loads_ours", "ours_loads_stock"]


@pytest.fixture(scope="module")
def seen(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return programs.seen_by("torchtitan_resumes", tmp_path_factory.mktemp("torchtitan"), needs="torchtitan")


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_reaches_the_weights_of_an_uninterrupted_one(seen: Any, way: str) -> None:
    assert seen[f"{way}_found"]
    assert seen[f"{way}_step"] == 4
    assert seen[f"{way}_same"]


@pytest.mark.parametrize("way", WAYS)
def test_as_many_steps_are_kept_as_the_configuration_says_and_nothing_else(seen: Any, way: str) -> None:
    assert seen[f"{way}_files"] == ["step-4", "step-6"]


def test_a_run_without_steps_starts_anew(seen: Any) -> None:
    assert not seen["found_in_nothing"]
