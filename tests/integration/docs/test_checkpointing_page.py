"""docs/checkpointing.md: its numbers are those of the code."""

from pathlib import Path

import pytest

from penstock.bench.checkpoint.checkpoint_run import KEY
from penstock.bench.page_cache_eviction import WARM_SHARE
from penstock.bench.state_layout import plan_layout
from penstock.results.run_folder import CHECKPOINTS_FILE
from penstock.workload.load_workload import load_model
from penstock.workload.shipped_catalog import cards

PAGE = (Path(__file__).parents[3] / "docs" / "checkpointing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(cards()))
def test_a_models_row_is_what_its_layout_says(name: str) -> None:
    layout = plan_layout(load_model(name))
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}`")]
    assert f"| {layout.total_bytes / 2**30:,.2f} GiB |" in row
    assert row.endswith(f"| {layout.num_files:,} |")
    if layout.num_parameters is not None:
        mesh = layout.mesh
        assert f"| {layout.num_parameters:,} |" in row
        assert f"| {mesh.tensor} x {mesh.pipeline} x {mesh.data} |" in row


def test_names_and_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"`{KEY}`" in PAGE
    assert f"`{CHECKPOINTS_FILE}`" in PAGE
    assert f"than {WARM_SHARE * 100:.0f} % did" in " ".join(PAGE.split())
