from pathlib import Path
from typing import Any

import pytest
from tests.integration.checkpoint.adapters.peers import Programs


@pytest.fixture(scope="module")
def seen(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("resiliency")
    return programs.seen_by("resiliency_saves", root, needs="nvidia_resiliency_ext")


def test_stock_torch_loads_the_values_of_the_moment_on_all_ranks(seen: Any) -> None:
    assert [rank["is_of_the_moment"] for rank in seen] == [True, True]


def test_ranks_share_what_they_all_hold_and_the_manifest_is_there(seen: Any) -> None:
    files = set(seen[0]["files"])
    assert {".metadata", "penstock.json", "__0_0.distcp", "__1_0.distcp"} <= files


@pytest.mark.slow
def test_the_worker_that_stays_writes_the_values_of_the_moment_too(
    programs: Programs, tmp_path: Path
) -> None:
    seen = programs.seen_by("resiliency_saves_persistently", tmp_path, needs="nvidia_resiliency_ext")
    assert [rank["is_of_the_moment"] for rank in seen] == [True, True]
