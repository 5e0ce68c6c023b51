"""examples/seven_runs.ipynb: runs from top to bottom, and its answers are the study's."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[4] / "examples" / "seven_runs.ipynb"

SAID = (
    "103.057664", "1060.072770", "472.086514",  # T1
    "577.07171420753", "288.5385148981586",  # T2
    "39.932368", "68.512567",  # T3
    "1025776223",  # T9
    "1032.015623",  # T10
    "392716773.889",  # T13
    "ranks 8-15 are missing", "the flush to lustre reads ssd",  # findings
    "report.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return "\n".join(
        str(output.get("text") or output.get("data", {}).get("text/plain"))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


@pytest.mark.parametrize("figure", SAID)
def test_the_notebook_comes_to_the_figures_of_the_study(answers: str, figure: str) -> None:
    assert figure in answers


def test_the_notebook_is_kept_with_outputs_that_name_no_place() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    shown = "".join(str(cell.get("outputs") or "") for cell in notebook.cells)
    assert all(figure in shown for figure in ("1060.072770", "ranks 8-15 are missing"))
    assert "/tmp" not in shown
    assert "/home" not in shown
