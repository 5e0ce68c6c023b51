"""The tour of the system on this machine's own disk: each flow once, small, and one page about all of them.

Invariant: the tour writes only below its own folder, and leaves nothing there but its report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.bench.probe import ProbeRequest, ProbeResult, probe
from penstock.bench.probe.rows import headline_rows, measurement_rows
from penstock.cluster.doctor import Diagnosis, examine
from penstock.cluster.solo import SoloComm
from penstock.results.page import Page, Section, render
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.environment import Environment
    from penstock.progress import Progress

PROBE_SIZE_BYTES = 512 << 20
PROBE_MAX_SECONDS = 4.0

_LIMITS = (
    "The fastest of each kind at {uri}, measured from one process. Everything that a training job does here "
    "is somewhere below these limits."
)
_METHOD = (
    "Each sequential measurement moved up to {size}. A write ends when its last byte is durable, fsync of "
    "file and folder included. Before a buffered read the files were dropped from memory. Streams are "
    "threads with one block in flight each."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tour:
    """What the tour saw, and where its page lies."""

    report: Path
    probe: ProbeResult
    diagnoses: tuple[Diagnosis, ...]

    def document(self) -> Mapping[str, Any]:
        """The tour as plain data."""
        return {
            "report": str(self.report),
            "probe": asdict(self.probe),
            "diagnoses": [asdict(seen) for seen in self.diagnoses],
        }


def tour(
    out: Path,
    *,
    environment: Environment,
    progress: Progress,
    probe_size_bytes: int = PROBE_SIZE_BYTES,
) -> Tour:
    """Walk through every flow below `out`, about a minute, and write `out/report.html` and `report.json`."""
    out.mkdir(parents=True, exist_ok=True)
    diagnoses = tuple(examine(out, environment))
    limits = probe(
        ProbeRequest(uri=str(out.resolve()), size_bytes=probe_size_bytes, max_seconds=PROBE_MAX_SECONDS),
        comm=SoloComm(gethostname()),
        environment=environment,
        options={},
        progress=progress,
    )
    seen = Tour(report=out / "report.html", probe=limits, diagnoses=diagnoses)
    seen.report.write_text(render(_page(seen)), encoding="utf-8")
    seen.report.with_suffix(".json").write_text(json.dumps(seen.document(), indent=2), encoding="utf-8")
    return seen


def _page(seen: Tour) -> Page:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lacks = [diagnosis for diagnosis in seen.diagnoses if diagnosis.state != "ok"]
    return Page(
        title="Penstock: a tour of this machine",
        subtitle=f"{', '.join(seen.probe.hosts)}, {when}, penstock {__version__}",
        sections=(
            Section(
                title="What this storage can do at best",
                prose=(_LIMITS.format(uri=seen.probe.uri),),
                rows=headline_rows(seen.probe.measurements),
                bars="GiB/s",
            ),
            Section(
                title="All measurements",
                prose=(_METHOD.format(size=format_bytes(seen.probe.size_bytes)), *seen.probe.notes),
                rows=measurement_rows(seen.probe.measurements),
                bars="GiB/s",
            ),
            Section(
                title="This machine",
                prose=() if lacks else ("Nothing is missing or limited.",),
                rows=[
                    {"what": lack.subject, "state": lack.state, "found": lack.found, "fix": lack.fix}
                    for lack in lacks
                ],
            ),
        ),
    )
