"""Every library comes with the base install or with a named extra, and a missing one is one sentence."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.extras import EXTRAS, explained_imports, missing_library

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "dask": "dask[dataframe]",
    "google_crc32c": "google-crc32c",
    "s3torchconnectorclient": "s3torchconnector",
    "yaml": "pyyaml",
}
FRAMEWORKS = {"accelerate", "lightning", "megatron", "nvidia_resiliency_ext", "torchtitan", "transformers"}
FRAMEWORKS |= {"safetensors"}
BROUGHT_ALONG = {"llvmlite", "urllib3"}  # by numba and by minio


def requirements(extra: str | None) -> set[str]:
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {re.split(r"[<>=]", line)[0].strip().lower() for line in lines}


def imported_libraries() -> set[str]:
    libraries: set[str] = set()
    package = ROOT / "src" / "penstock"
    kit = package / "testing"  # for test suites, which bring pytest themselves
    for path in package.rglob("*.py"):
        if path.is_relative_to(kit):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                libraries |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                libraries.add((node.module or "").partition(".")[0])
    return libraries - {"penstock"} - set(sys.stdlib_module_names)


def test_every_imported_library_is_in_the_base_install_or_in_an_extra() -> None:
    base = requirements(None)
    libraries = imported_libraries() - FRAMEWORKS - BROUGHT_ALONG - set(EXTRAS) - {"_typeshed"}
    assert {DISTRIBUTIONS.get(one, one).replace("_", "-") for one in libraries} <= base


@pytest.mark.parametrize(("library", "extra"), EXTRAS.items())
def test_an_extra_installs_its_library(library: str, extra: str) -> None:
    assert DISTRIBUTIONS.get(library, library).lower() in requirements(extra)


def test_a_missing_library_is_one_sentence_with_the_command_that_installs_it() -> None:
    error = ModuleNotFoundError("No module named 'duckdb'", name="duckdb")
    with pytest.raises(Unavailable) as raised, explained_imports():
        raise error
    assert str(raised.value) == "The library duckdb is not installed. Run: pip install 'penstock[trace]'"
    assert raised.value.__cause__ is error


def test_of_a_library_that_several_extras_have_the_callers_own_is_named() -> None:
    error = ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")
    assert "penstock[trace]" in str(missing_library(error, extra="trace"))


def test_a_module_of_no_extra_stays_the_defect_it_is() -> None:
    with pytest.raises(ModuleNotFoundError), explained_imports():
        raise ModuleNotFoundError("No module named 'penstock.gone'", name="penstock.gone")
