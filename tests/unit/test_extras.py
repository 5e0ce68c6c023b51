"""Every library belongs to the base install or to an extra, and the error for a missing one names it."""

import ast
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.optional_libraries import EXTRAS, explained_imports, missing_library

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
BROUGHT_ALONG = {"llvmlite", "pydantic_core", "urllib3"}  # by numba, pydantic and minio


def requirements(extra: str | None) -> set[str]:
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {re.split(r"[<>=]", line)[0].strip().lower() for line in lines}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node; expressions, which are most of a tree, hold no imports."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


def imported_libraries() -> set[str]:
    libraries: set[str] = set()
    package = ROOT / "src" / "penstock"
    kit = package / "testing"  # for test suites, which bring pytest themselves
    for path in package.rglob("*.py"):
        if path.is_relative_to(kit):
            continue
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                libraries |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                libraries.add((node.module or "").partition(".")[0])
    return libraries - {"penstock"} - set(sys.stdlib_module_names)


def test_every_imported_library_is_in_the_base_install_or_in_an_extra() -> None:
    base = requirements(None)
    libraries = imported_libraries() - FRAMEWORKS - BROUGHT_ALONG - set(EXTRAS) - {"_typeshed"}
    assert {DISTRIBUTIONS.get(one, one).replace("_", "-") for one in libraries} <= base


def installed_by(extra: str) -> set[str]:
    """The distributions of an extra, with those of the extras that it includes."""
    names = requirements(extra)
    for name in list(names):
        if name.startswith("penstock-io["):
            names |= installed_by(name.removeprefix("penstock-io[").removesuffix("]"))
    return names


@pytest.mark.parametrize(("library", "extras"), EXTRAS.items())
def test_an_extra_installs_its_library(library: str, extras: tuple[str, ...]) -> None:
    for extra in extras:
        assert DISTRIBUTIONS.get(library, library).lower() in installed_by(extra)


def test_a_missing_library_is_one_sentence_with_the_command_that_installs_it() -> None:
    error = ModuleNotFoundError("No module named 'duckdb'", name="duckdb")
    with pytest.raises(Unavailable) as raised, explained_imports():
        raise error
    assert str(raised.value) == "The library duckdb is not installed. Run: pip install 'penstock-io[trace]'"
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("library", "needed", "suggested"),
    [
        ("pyarrow", None, "bench"),
        ("pyarrow", "trace", "trace"),
        ("jinja2", "trace", "trace"),
        ("jinja2", None, "pages"),
        ("torch", "trace", "torch"),
    ],
)
def test_callers_extra_is_suggested_if_it_installs_the_library(
    library: str, needed: str | None, suggested: str
) -> None:
    error = ModuleNotFoundError(f"No module named '{library}.part'", name=f"{library}.part")
    assert f"penstock-io[{suggested}]" in str(missing_library(error, extra=needed))


WITHOUT_LIBRARY = """
import sys
sys.modules[sys.argv.pop(1)] = None
from penstock.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("pyarrow", "trace summary x.pfw", "trace"),
        ("duckdb", "trace sql QUERY x.pfw", "trace"),
        ("pyarrow", "training run unet3d_h100 --data data --results runs", "bench"),
    ],
)
def test_commands_name_the_extra_that_they_need(library: str, words: str, extra: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY, library, *words.split()],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert result.returncode == 3
    assert f"Run: pip install 'penstock-io[{extra}]'" in result.stderr


def test_no_text_installs_the_project_of_other_people() -> None:
    other = re.compile(r"""pip install ['"]?penstock(?!-io)|(?<![\w.])penstock\[""")
    texts = [
        *ROOT.glob("*.md"),
        ROOT / "pyproject.toml",
        ROOT / "Makefile",
        *(
            path
            for folder in ("src", "docs", "examples", "scripts", "benchmarks", ".github")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".ipynb", ".html", ".sh"}
        ),
    ]
    assert len(texts) > 100
    found = [str(path.relative_to(ROOT)) for path in texts if other.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_a_module_of_no_extra_stays_the_defect_it_is() -> None:
    with pytest.raises(ModuleNotFoundError), explained_imports():
        raise ModuleNotFoundError("No module named 'penstock.gone'", name="penstock.gone")


def test_interrupts_wait_until_a_library_is_imported() -> None:
    steps = []

    def import_slowly() -> None:
        with explained_imports():
            signal.raise_signal(signal.SIGINT)
            steps.append("imported")

    with pytest.raises(KeyboardInterrupt):
        import_slowly()
    assert steps == ["imported"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
