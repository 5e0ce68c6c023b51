"""The names in a results directory, which has one folder per run below a common parent.

    PARENT/NAME-20260102-030405-1a2b3c/
        run.json                       request, plan and figures; written first, with the outcome "running"
        steps.parquet spans.parquet    every step, epoch and checkpoint (`spool/` while the run lasts)
        checkpoints.json               each checkpoint written or read, and the totals
        throughput.parquet             each rank's bytes of checkpoints over time
        counters.parquet               the kernel counters of the hosts (`counters/` while the run lasts)
        cluster.json                   the facts of the hosts, if they were collected
        status.json                    the latest state of the run, updated while it lasts (`run_status`)
        report.html                    the page of the run (`run_page`)
        summary.json dlio.log R_output.json R_per_epoch_stats.json .hydra/    for readers of DLIO's files

    PARENT/.penstock/                  the history of all runs below PARENT (`history`)

Invariant: a run's folder is created by one process, under a unique name.
"""

import re
from datetime import datetime
from pathlib import Path
from typing import Final

from penstock.errors import ObjectNotFound
from penstock.reports.page import is_page
from penstock.results.run_status import STATUS_FILE
from penstock.storage.files.local_files import refuse_links
from penstock.storage.files.system_calls import translate_os_errors

RUN_FILE: Final = "run.json"
CLUSTER_FILE: Final = "cluster.json"
SUMMARY_FILE: Final = "summary.json"
CHECKPOINTS_FILE: Final = "checkpoints.json"
PAGE_FILE: Final = "report.html"
STAGES_FILE: Final = "stages.json"
"""The file about the parts of a training run that its score does not include."""
MEASURED_FILES: Final = {"probe": "probe.json", "kvcache": "kvcache.json"}
"""The figures of runs that neither train nor write checkpoints, by kind."""
_LEFT_BY_RUNS: Final = (
    SUMMARY_FILE,
    CLUSTER_FILE,
    "*.parquet",
    STAGES_FILE,
    CHECKPOINTS_FILE,
    *MEASURED_FILES.values(),
    STATUS_FILE,
    "progress",
    "spool/*.events",
    "counters/*.jsonl",
    "[0-9]*_output.json",
    "[0-9]*_per_epoch_stats.json",
)
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def run_folder_name(name: str, now: datetime, run_id: str) -> str:
    """Return the name of the folder for a run of workload `name` that starts at `now`."""
    safe_name = _UNSAFE.sub("-", name).strip("-.") or "run"
    return f"{safe_name}-{now:%Y%m%d-%H%M%S}-{run_id}"


def make_run_folder(folder: Path) -> Path:
    """Create a new folder for a run, and its parents if they are missing."""
    with translate_os_errors("Making the folder of this run", str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    return folder


def take_run_folder(folder: Path) -> None:
    """Prepare `folder` for a run: create it, or remove the files that an earlier run left in it."""
    with translate_os_errors("Making the folder of this run", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder / "spool", folder / "counters")
        if not (folder / RUN_FILE).is_file():
            return
        left = [path for pattern in _LEFT_BY_RUNS for path in folder.glob(pattern)]
        left += [page for page in (folder / PAGE_FILE,) if is_page(page)]
        for path in left:
            path.unlink()


def is_run(folder: Path) -> bool:
    """Check whether this is the folder of a run of Penstock or DLIO."""
    return (folder / RUN_FILE).is_file() or (folder / SUMMARY_FILE).is_file()


def may_delete(folder: Path) -> bool:
    """Return True if a folder is empty or has a file of a run: a forged history may name any folder."""
    of_runs = (STATUS_FILE, "spool/*.events", "counters/*.jsonl")
    return is_run(folder) or not any(folder.iterdir()) or any(any(folder.glob(one)) for one in of_runs)


def run_folders(parent: Path) -> list[Path]:
    """Return the folders of runs directly below `parent`, by name, or only `parent` if that is a run."""
    if is_run(parent):
        return [parent]
    if not parent.is_dir():
        raise ObjectNotFound(
            "No such directory of runs",
            uri=str(parent),
            fix="Give the one that runs were written to: `results ls DIR`, or --results DIR elsewhere.",
        )
    with translate_os_errors("Listing the runs", str(parent)):
        return sorted(folder for folder in parent.iterdir() if is_run(folder))
