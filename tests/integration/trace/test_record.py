"""`penstock trace record`: other people's programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import Unavailable, UsageError
from penstock.trace.capture.other import plan_recording

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def _record(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-m",
        "penstock",
        "trace",
        "record",
        "--tracer",
        "strace",
        "-o",
        str(tmp_path / "t"),
    ]
    return subprocess.run([*argv, *words], capture_output=True, text=True, timeout=100, check=False)


@needs_strace
def test_a_program_is_traced_with_its_paths_and_ends_as_it_would(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(100_000))
    ended = _record(tmp_path, "--", "cp", str(source), str(tmp_path / "target"))
    assert ended.returncode == 0, ended.stderr
    traces = "".join(path.read_text() for path in (tmp_path / "t").iterdir())
    assert str(source) in traces
    assert (tmp_path / "target").stat().st_size == 100_000


@needs_strace
def test_the_exit_code_is_the_programs(tmp_path: Path) -> None:
    assert _record(tmp_path, "--", "sh", "-c", "exit 7").returncode == 7
    assert _record(tmp_path, "--", "sh", "-c", "kill -TERM $$").returncode == 143


def test_bad_requests_are_refused_with_their_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no command to record"):
        plan_recording([], tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="strace is not installed"):
        plan_recording(["true"], tmp_path, tracer="strace")
    refused = _record(tmp_path, "--tracer", "ebpf", "--", "true")
    assert refused.returncode == 2
    assert "no such tracer" in refused.stderr
