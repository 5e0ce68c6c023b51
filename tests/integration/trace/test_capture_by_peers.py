"""DFTracer's own tools open our traces and count the same events."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

from penstock.trace.capture.recorder import TraceRecorder, clock_ns
from penstock.trace.capture.trace_writer import EventKind, Layer
from penstock.trace.event_schema import TraceFile
from penstock.trace.trace_set import read_trace_file

TOOLS = Path(sysconfig.get_path("scripts"))

pytestmark = pytest.mark.skipif(
    not (TOOLS / "dftracer_event_count").exists(), reason="dftracer-utils is not installed"
)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two traces, the first of several segments, with names that have to be escaped."""
    folder = tmp_path / "traces"
    kind = EventKind("pwrite64", "POSIX", Layer.LIBC_IO)
    for rank in range(2):
        recorder = TraceRecorder(folder, f"{rank}/2")
        for number in range(3000):
            path = f'/data/{number % 7} "quoted"\\\n'
            recorder.record(kind, clock_ns(), path, 10 * number, 10, 10, {"step": number, "note": 'a "b"'})
            if number % 1000 == 0 and rank == 0:
                recorder.flush()
        recorder.close()
    return folder


def test_dftracers_tools_find_every_event_and_no_bad_line(traces: Path) -> None:
    num_events = 0
    for path in sorted(traces.glob("*.pfw.gz")):
        reading = read_trace_file(TraceFile(path=path))
        num_events += sum(batch.num_rows for batch in reading.batches)
        assert reading.account.is_whole
    assert num_events == 2 * (3000 + 1)
    assert _told(traces, "dftracer_event_count").splitlines()[-1] == str(num_events)
    assert "2 passed, 0 failed" in _told(traces, "dftracer_validate")


def _told(traces: Path, tool: str) -> str:
    ended = subprocess.run(
        [TOOLS / tool, "-d", str(traces), "--log-level", "off"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
