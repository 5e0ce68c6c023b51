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
WORKERS = (["trace", "summary", "--dask", "local", "."], ["trace", "summary", "."])
RANKS = ["storage", "probe", "probed", "--ranks", "2", "--size", "8MiB", "--blocks", "1MiB", "--streams", "1"]


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


@pytest.mark.parametrize("words", [*WORKERS, RANKS])
def test_nothing_of_a_stranger_is_executed_by_a_command_and_what_it_starts(
    tmp_path: Path, words: list[str]
) -> None:
    fill(tmp_path, LIBRARIES | set(sys.stdlib_module_names) | {"penstock"})
    run(tmp_path, str(Path(sys.executable).with_name("penstock")), *words)


def test_nothing_of_a_stranger_stands_in_for_a_library_of_the_module(tmp_path: Path) -> None:
    fill(tmp_path, LIBRARIES - {"penstock"})
    run(tmp_path, sys.executable, "-m", "penstock", "doctor")


def test_every_interpreter_that_is_started_leaves_the_working_folder_off_its_path() -> None:
    sources = [path.read_text() for path in Path(penstock.__file__).parent.rglob("*.py")]
    commands = [rest for text in sources for rest in re.findall(r"sys\.executable, (.*)", text)]
    assert len(commands) >= 4
    assert all(rest.startswith('"-P"') for rest in commands)
