"""Arrow's functions are found without the wrappers that take long to import, and with them otherwise."""

import runpy
import subprocess
import sys
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest

from penstock.trace import arrow_functions
from penstock.trace.arrow_functions import find_distinct


def test_wrappers_of_functions_are_not_imported() -> None:
    program = "import sys; import penstock.trace.arrow_functions; sys.exit('pyarrow.compute' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_without_arrows_inner_module_its_public_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow._compute", ModuleType("pyarrow._compute"))
    functions = runpy.run_path(arrow_functions.__file__)
    assert functions["take"](pa.array([5, 6, 7]), np.array([2, 0])).to_pylist() == [7, 5]
    assert functions["cast"](pa.array([1]), pa.int32()).type == pa.int32()


@pytest.mark.parametrize("num_codes", [None, 3, 100])
@pytest.mark.parametrize("codes", [[], [2], [2, 0, 2, 2, 0]])
def test_distinct_codes_are_in_order_with_the_place_of_each(codes: list[int], num_codes: int | None) -> None:
    known, places = find_distinct(np.array(codes, dtype=np.int64), num_codes)
    assert known.tolist() == sorted(set(codes))
    assert known[places].tolist() == codes
