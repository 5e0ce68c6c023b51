"""One whole result of our own runs, which all tests of it share and none changes."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.workflows.submission.small_result import SmallResult
from tests.support.repeated_measurement import measure_until

from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.rules.rule import Verdict


@pytest.fixture(scope="session")
def apart() -> Iterator[Path]:
    """A folder on another file system than that of temporary files, where this machine has one."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, apart: Path) -> SmallResult:
    return measure_until(lambda _: _make_result(tmp_path_factory.mktemp("made"), apart), _rates_agree)


def _rates_agree(small: SmallResult) -> bool:
    """Whether runs took as long as their steps say: on a busy machine an epoch's start may take longer."""
    (judged,) = check(small.root, load_edition("v3.0"))
    return "rates.utilization" not in {
        found.rule for found in judged.findings if found.verdict is Verdict.WARNING
    }


def _make_result(folder: Path, apart: Path) -> SmallResult:
    small = SmallResult(root=folder / "tree", data=apart / folder.name / "data")
    small.describe()
    sequence, said = small.whole()
    assert len(sequence.counted) == 6
    assert said[-2] == "run 6 of 6"
    assert said[-1].startswith("run 6 of 6: AU ")
    return small
