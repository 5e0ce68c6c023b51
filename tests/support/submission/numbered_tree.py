"""Small v1.0 trees: a valid submission as values that tests change before it is written.

Place in the flow: values -> (a test's change) -> files. Invariant: no tree is kept in this module; each call
of `valid_submission` makes new values.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Final

import yaml

from penstock.submission.result_figures import MIB

RECORD_BYTES: Final = 146_600_628
BATCH: Final = 7
NUM_ACCELERATORS: Final = 2
NUM_FILES: Final = 500 * BATCH * NUM_ACCELERATORS
RESULT: Final = "results/fast/unet3d"
RATES: Final = (41.5, 41.6, 41.7, 41.8, 41.9)
"""Samples a second of the runs: two h100 can compute 43.3."""
HOST_GIB: Final = 64
BEGIN: Final = datetime(2024, 8, 1, 10, 0, 0)  # noqa: DTZ001 - the files have no time zone
BETWEEN_RUNS: Final = timedelta(minutes=16)


@dataclass(kw_only=True)
class Submission:
    """The files of one submitter by path: values of JSON or YAML, or the text of a file."""

    files: dict[str, Any]
    division: str = "closed"
    organisation: str = "acme"
    edition: str = "v1.0"

    def drop(self, prefix: str) -> None:
        """Take out all files whose path begins with `prefix`."""
        self.files = {path: value for path, value in self.files.items() if not path.startswith(prefix)}

    def summary(self, run: int) -> dict[str, Any]:
        """The summary of a run, to change."""
        found: dict[str, Any] = self.files[f"{RESULT}/run{run}/summary.json"]
        return found

    def summaries(self) -> list[dict[str, Any]]:
        """The summaries of all runs."""
        return [value for path, value in self.files.items() if path.endswith("/summary.json")]

    def configs(self) -> list[dict[str, Any]]:
        """The workload sections of all runs' configurations."""
        return [
            value["workload"] for path, value in self.files.items() if path.endswith("configs/config.yaml")
        ]

    def overrides(self, run: int) -> list[str]:
        """What the command line of a run set."""
        found: list[str] = self.files[f"{RESULT}/run{run}/configs/overrides.yaml"]
        return found

    def report(self) -> dict[str, Any]:
        """The report's figures."""
        found: dict[str, Any] = self.files[f"{RESULT}/mlperf_storage_report.json"]["overall"]
        return found

    def paths(self) -> dict[str, Any]:
        """The values by the paths that they are written to."""
        return {f"{self.division}/{self.organisation}/{path}": value for path, value in self.files.items()}

    def text(self, path: str, value: Any) -> str:
        """What a file of this value holds."""
        return _text(path, value)

    def write(self, root: Path) -> Path:
        """Write the tree below `root`, which is then a whole round's folder."""
        for name, value in self.paths().items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_text(name, value), encoding="utf-8")
        return root


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if name.lower().endswith(".json") else yaml.safe_dump(value)


def valid_submission(num_runs: int = 5) -> Submission:
    """One result of unet3d on two h100 and one host of 64 GiB, which keeps every rule."""
    node = {"node_type_name": "client", "DRAM": {"capacity_GiB": HOST_GIB}}
    files: dict[str, Any] = {"code/README": "the benchmark's code", "systems/fast.json": {"nodes": [node]}}
    rates = RATES[:num_runs]
    for run, rate in enumerate(rates, start=1):
        folder, begin = f"{RESULT}/run{run}", BEGIN + run * BETWEEN_RUNS
        statistics = epoch_statistics(begin, epoch_rates(rate), NUM_FILES)
        files[f"{folder}/summary.json"] = _summary(rate, begin, statistics)
        files[f"{folder}/per_epoch_stats.json"] = statistics
        files[f"{folder}/configs/config.yaml"] = {"workload": _workload()}
        files[f"{folder}/configs/overrides.yaml"] = [
            "workload=unet3d_h100",
            "++workload.workflow.generate_data=False",
            "++workload.workflow.train=True",
            f"++workload.dataset.num_files_train={NUM_FILES}",
            "++workload.dataset.data_folder=/mnt/data",
        ]
    files[f"{RESULT}/mlperf_storage_report.json"] = {"overall": _overall(rates)}
    return Submission(files=files)


def epoch_rates(rate: float) -> list[float]:
    """Those of five epochs, with this mean."""
    return [rate - 1, rate + 1, rate, rate, rate]


def epoch_statistics(begin: datetime, rates: Sequence[float], num_samples: int) -> dict[str, Any]:
    """What a benchmark writes of epochs that read all samples at these rates, a second after one another."""
    statistics: dict[str, Any] = {}
    for number, rate in enumerate(rates, start=1):
        begin += timedelta(seconds=1)
        end = begin + timedelta(seconds=num_samples / rate)
        times = {
            "start": begin.isoformat(),
            "end": end.isoformat(),
            "duration": f"{(end - begin).total_seconds():.2f}",
        }
        statistics[str(number)] = {**times, "block1": dict(times)}
        begin = end
    return statistics


def _summary(rate: float, begin: datetime, statistics: dict[str, Any]) -> dict[str, Any]:
    return {
        "start": begin.isoformat(),
        "end": statistics["5"]["end"],
        "epochs": 5,
        "num_accelerators": NUM_ACCELERATORS,
        "num_hosts": 1,
        "host_memory_GB": [float(HOST_GIB)],
        "host_meminfo": {"MemTotal": f"{HOST_GIB << 20} kB"},
        "num_files_train": NUM_FILES,
        "num_samples_per_file": 1,
        "metric": {
            "train_au_percentage": [96.0, 98.0, 97.0, 97.0, 97.0],
            "train_au_mean_percentage": 97.0,
            "train_au_meet_expectation": "success",
            "train_throughput_samples_per_second": epoch_rates(rate),
            "train_throughput_mean_samples_per_second": rate,
            "train_io_mean_MB_per_second": rate * RECORD_BYTES / MIB,
        },
    }


def _workload() -> dict[str, Any]:
    return {
        "model": "unet3d",
        "framework": "pytorch",
        "dataset": {
            "format": "npz",
            "num_files_train": NUM_FILES,
            "num_samples_per_file": 1,
            "record_length": RECORD_BYTES,
            "record_length_stdev": 68_341_808,
            "record_length_resize": 2_097_152,
        },
        "reader": {
            "batch_size": BATCH,
            "data_loader": "pytorch",
            "file_shuffle": "seed",
            "read_threads": 16,
            "sample_shuffle": "seed",
        },
        "train": {"epochs": 5, "computation_time": 0.323},
        "metric": {"au": 0.9},
    }


def _overall(rates: tuple[float, ...]) -> dict[str, Any]:
    mib = tuple(rate * RECORD_BYTES / MIB for rate in rates)
    return {
        "model": "unet3d",
        "train_throughput_mean_samples_per_second": fmean(rates),
        "train_throughput_stdev_samples_per_second": pstdev(rates),
        "train_throughput_mean_MB_per_second": fmean(mib),
        "train_throughput_stdev_MB_per_second": pstdev(mib),
    }
