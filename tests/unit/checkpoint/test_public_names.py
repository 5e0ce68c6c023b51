"""What users import, and what importing it costs."""

import subprocess
import sys

import pytest

import penstock.checkpoint as pc

LAZY = """
import sys
import penstock.checkpoint as pc
loaded = {"torch", "numpy", "pydantic"} & set(sys.modules)
assert not loaded, loaded
pc.Manager, pc.SaveHandle
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("name", pc.__all__)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(pc, name).__name__ == name
    assert name in dir(pc)


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(AttributeError, match=r"penstock\.checkpoint has no 'Manger'\. It has: .*Manager"):
        _ = pc.Manger


def test_torch_is_loaded_by_what_needs_it_and_not_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAZY], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
