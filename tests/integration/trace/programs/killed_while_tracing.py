"""Records so many events, then kills itself: `killed_while_tracing.py FOLDER NUMBER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from penstock.trace.capture.recorder import TraceRecorder, clock_ns
from penstock.trace.capture.trace_writer import EventKind, Layer

folder, number = Path(sys.argv[1]), int(sys.argv[2])
work = EventKind("work", "app", Layer.PYTHON)
recorder = TraceRecorder(folder)
for step in range(number):
    recorder.record(work, clock_ns(), args={"step": step})
    if step == number // 2:
        recorder.flush()
os.kill(os.getpid(), signal.SIGKILL)
