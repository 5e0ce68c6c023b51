"""The study of seven runs, synthesized, read and compared once for all tests of this folder."""

from pathlib import Path

import pytest
from tests.support.synthesize import read_description, synthesize

from penstock.trace.compare.comparison import ComparisonResult, compare_runs
from penstock.trace.compare.trace_study import ComparisonSpec, load_document, open_study


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "seven"
    synthesize(read_description("seven_runs"), folder)
    return folder


@pytest.fixture(scope="session")
def compared(study_folder: Path) -> ComparisonResult:
    asked = load_document(ComparisonSpec, study_folder / "runs.yaml")
    with open_study(asked, study_folder) as study:
        return compare_runs(study)
