"""A working folder that a stranger filled: its Python files are named as what Penstock and Python import."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from tests.support.trace_files import Writing, write_trace

import penstock

LIBRARIES = {*packages_distributions(), "cupy", "darshan", "dftracer", "sitecustomize", "usercustomize"}
VERBS = (
    ["trace", "summary", "--dask", "local", "."],
    ["trace", "summary", "."],
    ["storage", "probe", "probed", "--ranks", "2", "--size", "8MiB", "--blocks", "1MiB", "--streams", "1"],
    ["trace", "load", "-o", "x.events", "."],
    ["checkpoint", "ls", "."],
    ["results", "ls", "."],
    ["submission", "check", "."],
    ["kvcache", "models"],
    ["cluster", "collect", "-o", "cluster.json"],
    ["training", "size", "unet3d_h100", "--accelerators", "2", "--host-memory", "64GiB"],
    ["workloads"],
)
"""At least one of each group, and those that start processes."""
AS_THE_PROGRAM = """
import sys
from penstock.cli.app import main
for words in {verbs!r}:
    sys.argv = ["penstock", *words]
    if main() not in (0, 1, 2):
        sys.exit(70)
"""


def fill(folder: Path, names: set[str]) -> None:
    for name in names:
        code = f"open({str(folder / 'executed')!r}, 'a').write({name + chr(10)!r})\n"
        (folder / f"{name}.py").write_text(code)
    write_trace(folder, Writing(events=10))
    (folder / "x.darshan").write_bytes(b"not Darshan's")


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert not (folder / "executed").exists(), (folder / "executed").read_text()


def test_nothing_of_a_stranger_is_executed_by_a_command_and_what_it_starts(tmp_path: Path) -> None:
    fill(tmp_path, LIBRARIES | set(sys.stdlib_module_names) | {"penstock"})
    # One process for all, because starting one costs more than most verbs; -P is what a script has.
    run(tmp_path, sys.executable, "-P", "-c", AS_THE_PROGRAM.format(verbs=VERBS))


def test_the_program_itself_looks_for_no_code_in_the_working_folder(tmp_path: Path) -> None:
    fill(tmp_path, LIBRARIES | set(sys.stdlib_module_names) | {"penstock"})
    run(tmp_path, str(Path(sys.executable).with_name("penstock")), "--version")


def test_nothing_of_a_stranger_stands_in_for_a_library_of_the_module(tmp_path: Path) -> None:
    fill(tmp_path, LIBRARIES - {"penstock"})
    run(tmp_path, sys.executable, "-m", "penstock", "doctor")


def test_every_interpreter_that_is_started_leaves_the_working_folder_off_its_path() -> None:
    sources = [path.read_text() for path in Path(penstock.__file__).parent.rglob("*.py")]
    commands = [rest for text in sources for rest in re.findall(r"sys\.executable, (.*)", text)]
    assert len(commands) >= 4
    assert all(rest.startswith('"-P"') for rest in commands)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (".numba_config.yaml", "import penstock.compiling"),
        ("ucx.conf", "from penstock.cluster.mpi_comm import join_mpi; join_mpi('h', 1)"),
    ],
)
def test_a_library_that_would_obey_a_file_in_the_working_folder_is_not_loaded(
    tmp_path: Path, file: str, code: str
) -> None:
    written = tmp_path / "written"
    (tmp_path / file).write_text(f"UCX_LOG_FILE={written}\n" if file == "ucx.conf" else "disable_jit: 1\n")
    refused = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert f"would obey a file in the current directory ({file}). Move the file" in refused.stderr
    assert not written.exists()


def test_settings_that_come_into_the_working_folder_later_have_no_effect_on_compiled_loops(
    tmp_path: Path,
) -> None:
    code = """
import pathlib, sys, numba, penstock.compiling
pathlib.Path(".numba_config.yaml").write_text("disable_jit: 1")
numba.core.config.reload_config()
sys.exit(2 * numba.config.DISABLE_JIT)
"""
    run(tmp_path, sys.executable, "-P", "-c", code)
