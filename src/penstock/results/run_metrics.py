"""A run's status as Prometheus reads it: a file for node exporter's text collector, or a small web server.

docs/following.md documents names and labels; they stay. Every family has the same help and type in all files,
because a collector reads the files of several runs as one.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock import __version__
from penstock.errors import UsageError
from penstock.results.run_status import DIED, RUNNING, RunStatus, replace_file

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
STATES: Final = (
    "working", "computing", "waiting for samples", "waiting for storage", "waiting for ranks",
)  # fmt: skip
OUTCOMES: Final = (RUNNING, "finished", "failed", "interrupted", DIED)
FILE_INTERVAL_S: Final = 5.0
"""Collectors read the file every 15 s or less often."""
KEPT_S: Final = 3600.0
"""The file of a run that wrote nothing for so long is removed by the next run there."""
_PREFIX: Final = "penstock-"
_LONGEST_REQUEST_S: Final = 5.0
_LONGEST_REQUEST_BYTES: Final = 16_384

Sample = tuple[str, dict[str, str], float]


def _families(status: RunStatus) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """Name, type, help and samples (suffix, labels, value) of every family."""
    gauge, counter = "gauge", "counter"
    facts = {"kind": status.kind, "workload": status.workload, "host": status.host, "version": __version__}
    yield "info", gauge, "What the run is; always 1.", [("", facts, 1)]
    yield "ranks", gauge, "Ranks of the run.", [("", {}, status.ranks)]
    yield (
        "outcome", gauge, "1 for how the run ended, or running.",
        [("", {"outcome": name}, status.outcome == name) for name in OUTCOMES],
    )  # fmt: skip
    yield "start_time_seconds", gauge, "When the run began, since 1970.", [("", {}, status.started_at_s)]
    yield "update_time_seconds", gauge, "When the run last said anything.", [("", {}, status.written_at_s)]
    if status.exit_code is not None:
        yield "exit_code", gauge, "The exit code of the run's command.", [("", {}, status.exit_code)]
    state = status.state if status.outcome == RUNNING else ""
    yield (
        "state", gauge, "1 for what rank 0 does now.",
        [("", {"state": name.replace(" ", "_")}, state == name) for name in STATES],
    )  # fmt: skip
    yield (
        "state_seconds", gauge, "For how long rank 0 has been in its state.",
        [("", {}, status.state_s if state else 0)],
    )  # fmt: skip
    yield (
        "absent_rank", gauge, "1 for each rank that rank 0 waits for, the first eight of them.",
        [("", {"rank": str(rank)}, 1) for rank in status.absent_ranks],
    )  # fmt: skip
    phase = {"phase": status.phase}
    if status.phase_total:
        done = min(1.0, status.phase_done / status.phase_total)
        yield "phase_done_ratio", gauge, "Share of the present phase that is done.", [("", phase, done)]
    if status.share_done is not None:
        yield "done_ratio", gauge, "Share of the whole run that is done.", [("", {}, status.share_done)]
    if status.left_s is not None:
        yield "left_seconds", gauge, "Estimated time to the end of the run.", [("", {}, status.left_s)]
    yield (
        "counted_total", counter, "What all ranks have done: read_bytes, written_bytes, samples, steps.",
        [("", {"unit": unit}, total) for unit, total in status.totals.items() if not unit.endswith("_s")],
    )  # fmt: skip
    yield (
        "rank0_seconds_total", counter, "Where the time of rank 0 went: computing, sample_wait, rank_wait.",
        [("", {"what": unit[:-2]}, total) for unit, total in status.totals.items() if unit.endswith("_s")],
    )  # fmt: skip


def format_metrics(status: RunStatus) -> str:
    """The text of one run."""
    lines: list[str] = []
    for name, kind, text, samples in _families(status):
        if samples:
            lines += [f"# HELP penstock_run_{name} {text}", f"# TYPE penstock_run_{name} {kind}"]
        for suffix, labels, value in samples:
            pairs = {"run": status.run, **labels}
            written = ",".join(f'{label}="{_escape(content)}"' for label, content in pairs.items())
            lines.append(f"penstock_run_{name}{suffix}{{{written}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class TextCollectorFile:
    """Keeps `DIR/penstock-RUN.prom` up to date; its last state stays until `KEPT_S` have passed."""

    interval_s = FILE_INTERVAL_S

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(
                "No such directory",
                where=f"--metrics-dir {folder}",
                fix="Name the text collector's directory.",
            )
        self._folder = folder
        for old in folder.glob(f"{_PREFIX}*.prom"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > KEPT_S:
                    old.unlink()

    def show(self, status: RunStatus) -> None:
        """Replace the file in one step."""
        replace_file(self._folder / f"{_PREFIX}{status.run}.prom", format_metrics(status).encode())

    def close(self) -> None:
        """Leave the last state."""


class MetricsServer:
    """Answers `GET /metrics` with the state of the last second, by one thread, one connection at a time.

    The standard library's server spends four times the CPU of everything else here on parsing a request.
    """

    interval_s = 1.0

    def __init__(self, host: str, port: int) -> None:
        self._status: RunStatus | None = None
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise UsageError(
                f"Cannot serve metrics: {error.strerror or error}",
                where=f"--metrics {host}:{port}",
                fix="Choose another port; 0 takes a free one.",
            ) from error
        self.address = f"http://{host}:{self._listener.getsockname()[1]}/metrics"
        threading.Thread(target=self._serve, name="penstock-metrics", daemon=True).start()

    def show(self, status: RunStatus) -> None:
        """Answer with this from now on."""
        self._status = status

    def close(self) -> None:
        """Stop answering."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            with connection, suppress(OSError):
                connection.settimeout(_LONGEST_REQUEST_S)
                request = b""
                while b"\r\n\r\n" not in request and len(request) < _LONGEST_REQUEST_BYTES:
                    piece = connection.recv(4096)
                    if not piece:
                        break
                    request += piece
                connection.sendall(self._answer(request))

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET" or path not in (b"/metrics", b"/"):
            line, kind, body = "404 Not Found", "text/plain", b"The figures are at /metrics.\n"
        else:
            line, kind = "200 OK", CONTENT_TYPE
            body = format_metrics(self._status).encode() if self._status else b""
        head = f"HTTP/1.1 {line}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"Connection: close\r\n\r\n" + body
