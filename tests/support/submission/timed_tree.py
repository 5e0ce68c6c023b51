"""Small trees of v2.0 and v3.0: a valid training and a valid checkpointing, as values that tests change.

Place in the flow: values -> (a test's change) -> files. Invariant: no tree is kept in this module; each call
makes new values. Digests are computed here by the rule's words, not by the code that judges them.
"""

import copy
import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, wraps
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from tests.support.submission.numbered_tree import epoch_rates, epoch_statistics
from tests.support.submission.run_records import run_record

from penstock.submission.result_figures import MIB
from penstock.workload.shipped_catalog import cards, families

RECORD_BYTES: Final = 146_600_628
BATCH: Final = 7
NUM_ACCELERATORS: Final = 8
NUM_HOSTS: Final = 2
HOST_GIB: Final = 256.0
NUM_FILES: Final = 500 * BATCH * NUM_ACCELERATORS
NUM_RUNS: Final = 6
NUM_EPOCHS: Final = 5
SYSTEM: Final = "fast"
BEGIN: Final = datetime(2026, 7, 1, 10, 0, 0)  # noqa: DTZ001 - the files have no time zone
RUN_TIME: Final = timedelta(minutes=18)
PAUSE: Final = timedelta(minutes=2)
CHECKPOINT_GIB: Final = 104.75
NUM_CHECKPOINTS: Final = 10
FLUSH: Final = timedelta(seconds=20)
"""Between the last write and the first read."""


@dataclass(kw_only=True)
class Round:
    """The files of a whole tree by path: values of JSON or YAML, or the text of a file."""

    files: dict[str, Any]
    edition: str = "v3.0"
    division: str = "closed"
    organisation: str = "acme"

    @property
    def home(self) -> str:
        """The submitter's folder, as it is in `files`."""
        return "closed/acme"

    def drop(self, part: str) -> None:
        """Take out all files whose path has `part` in it."""
        self.files = {path: value for path, value in self.files.items() if part not in path}

    def rename(self, old: str, new: str) -> None:
        """Give other names to what has `old` in its path."""
        self.files = {path.replace(old, new): value for path, value in self.files.items()}

    def leaves(self, phase: str) -> list[str]:
        """The leaves of a phase of the training, or of the `checkpointing`, in order of time."""
        return sorted({path.rsplit("/", 1)[0] for path in self._of(phase) if path.endswith("_metadata.json")})

    def document(self, phase: str, number: int, name: str) -> Any:
        """The values of the file of a leaf whose name ends with `name`, to change."""
        leaf = self.leaves(phase)[number]
        return next(
            value for path, value in self.files.items() if path.startswith(leaf) and path.endswith(name)
        )

    def documents(self, phase: str, name: str) -> list[Any]:
        """The values of such files of all leaves of a phase."""
        return [self.document(phase, number, name) for number in range(len(self.leaves(phase)))]

    def metadata(self, phase: str, number: int = 0) -> dict[str, Any]:
        """What a leaf says of itself."""
        found: dict[str, Any] = self.document(phase, number, "_metadata.json")
        return found

    def summary(self, phase: str, number: int = 0) -> dict[str, Any]:
        """The figures of a leaf."""
        found: dict[str, Any] = self.document(phase, number, "/summary.json")
        return found

    def config(self, phase: str, number: int = 0) -> dict[str, Any]:
        """The workload of a leaf's configuration."""
        found: dict[str, Any] = self.document(phase, number, "dlio_config/config.yaml")["workload"]
        return found

    def rename_model(self, model: str) -> None:
        """Make the checkpointing one of another model, whose own configuration it has."""
        self.rename("llama3-8b", model)
        for leaf in range(len(self.leaves("checkpointing"))):
            metadata = self.metadata("checkpointing", leaf)
            metadata["model"] = model
            parameters = metadata.get("parameters") or metadata["combined_params"]
            for workload in (self.config("checkpointing", leaf), parameters):
                workload["model"] = copy.deepcopy(cards()[model].sections["model"])

    def overrides(self, phase: str, number: int = 0) -> list[str]:
        """What a leaf's command line set."""
        found: list[str] = self.document(phase, number, "dlio_config/overrides.yaml")
        return found

    def system(self) -> dict[str, Any]:
        """The description of the system under test."""
        found: dict[str, Any] = self.files[f"{self.home}/systems/{SYSTEM}.yaml"]["system_under_test"]
        return found

    def paths(self) -> dict[str, Any]:
        """The values by the paths that they are written to."""
        home = f"{self.division}/{self.organisation}"
        return {path.replace(self.home, home): value for path, value in self.files.items()}

    def text(self, _path: str, value: Any) -> str:
        """What a file of this value holds."""
        return _text(value)

    def write(self, root: Path) -> Path:
        """Write the tree below `root`."""
        for name, value in self.paths().items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_text(value), encoding="utf-8")
        return root

    def _of(self, phase: str) -> Iterator[str]:
        middle = "/checkpointing/" if phase == "checkpointing" else f"/{phase}/"
        return (path for path in self.files if middle in path)


ACCELERATORS: Final = {"v2.0": "h100", "v3.0": "b200"}


def made_once(make: Callable[..., Round]) -> Callable[..., Round]:
    """Build each tree once; every call gets a copy of its own."""
    build = cache(lambda *args, **options: pickle.dumps(make(*args, **options)))

    @wraps(make)
    def copy_tree(*args: Any, **options: Any) -> Round:
        tree: Round = pickle.loads(build(*args, **options))
        return tree

    return copy_tree


@made_once
def valid_training(
    edition: str = "v3.0", *, workload: str = "unet3d", accelerator: str = "", num_runs: int = NUM_RUNS
) -> Round:
    """One warm-up and five runs on eight accelerators and two hosts, with the leaves before them."""
    files = shared_files(edition)
    model = f"closed/acme/results/{SYSTEM}/training/{workload}"
    maker = _Training(edition=edition, workload=workload, accelerator=accelerator or ACCELERATORS[edition])
    sized, generated = BEGIN - timedelta(hours=3), BEGIN - timedelta(hours=2)
    files |= maker.leaf(model, "datasize", sized)
    files |= maker.leaf(model, "datagen", generated)
    for number in range(num_runs):
        files |= maker.leaf(
            model, "run", BEGIN + number * (RUN_TIME + PAUSE), rate=maker.rate() + number / 10
        )
    rates = tuple(maker.rate() + number / 10 for number in range(1, num_runs))
    files[f"{model}/run/results.json"] = {
        "metrics": {
            "train_throughput_mean_samples_per_second": fmean(rates),
            "train_au_mean_percentage": 97.0,
        }
        if rates
        else {}
    }
    return finished(files, edition)


@made_once
def valid_checkpointing(edition: str = "v3.0", *, num_invocations: int = 2) -> Round:
    """llama3-8b on eight accelerators of one host: ten writes and ten reads, together or in turn."""
    files = shared_files(edition)
    description = files[f"closed/acme/systems/{SYSTEM}.yaml"]["system_under_test"]
    description["clients"][0]["quantity"] = 1
    model = f"closed/acme/results/{SYSTEM}/checkpointing/llama3-8b"
    if num_invocations == 1:
        files |= _checkpointing(edition, model, BEGIN, writes=NUM_CHECKPOINTS, reads=NUM_CHECKPOINTS)
    else:
        files |= _checkpointing(edition, model, BEGIN, writes=NUM_CHECKPOINTS, reads=0)
        files |= _checkpointing(edition, model, BEGIN + RUN_TIME + FLUSH, writes=0, reads=NUM_CHECKPOINTS)
    durations = tuple(4.0 + number / 4 for number in range(NUM_CHECKPOINTS))
    files[f"{model}/results.json"] = {
        "metrics": {f"{way}_checkpoint_duration_mean_seconds": fmean(durations) for way in ("save", "load")}
    }
    return finished(files, edition)


@made_once
def valid_round(edition: str = "v3.0") -> Round:
    """Both, on two systems of one submitter."""
    training, checkpointing = valid_training(edition), valid_checkpointing(edition)
    other = copy.deepcopy(checkpointing.files)
    described = other.pop(f"closed/acme/systems/{SYSTEM}.yaml")
    described["system_under_test"]["solution"]["submission_name"] = "small"
    other |= {"closed/acme/systems/fast.yaml": described}
    moved = {path.replace(f"/{SYSTEM}", "/small"): value for path, value in other.items()}
    return finished({**moved, **training.files}, edition)


@dataclass(frozen=True, kw_only=True)
class _Training:
    edition: str
    workload: str
    accelerator: str

    def leaf(self, model: str, phase: str, begin: datetime, rate: float = 0.0) -> dict[str, Any]:
        time = f"{begin:%Y%m%d_%H%M%S}"
        folder = f"{model}/{phase}/{time}"
        files: dict[str, Any] = {f"{folder}/training_{time}_metadata.json": self._metadata(phase, begin)}
        files |= pointer(self.edition, folder)
        if phase == "datasize":
            return files
        files |= _printed(folder, f"training_{phase}") | self._configuration(folder, phase)
        if phase == "datagen":
            files[f"{folder}/datagen-manifest.json"] = {"num_files_train": NUM_FILES}
            return files
        files |= _ranks(folder) | sealed(self.edition, folder)
        files[f"{folder}/0_per_epoch_stats.json"] = epoch_statistics(begin, epoch_rates(rate), NUM_FILES)
        files[f"{folder}/summary.json"] = self._summary(begin, rate)
        files[f"{folder}/run.json"] = run_record(
            num_samples=NUM_FILES, num_ranks=NUM_ACCELERATORS, num_epochs=NUM_EPOCHS
        )
        return files

    def rate(self) -> float:
        """Samples a second: 95 % of what the accelerators can compute."""
        values = self._values()
        step_s: float = values["train"]["computation_time"]
        batch: int = values["reader"]["batch_size"]
        return round(0.95 * batch * NUM_ACCELERATORS / step_s, 1)

    def _values(self) -> dict[str, Any]:
        family = families()[self.workload]
        values: dict[str, Any] = copy.deepcopy(family["workload"])
        for section, entries in family["accelerators"][self.accelerator].items():
            values.setdefault(section, {}).update(copy.deepcopy(entries))
        values["dataset"] |= {
            "num_files_train": NUM_FILES,
            "num_subfolders_train": 0,
            "data_folder": "/mnt/data",
        }
        return values

    def _configuration(self, folder: str, phase: str) -> dict[str, Any]:
        return {
            f"{folder}/dlio_config/config.yaml": {"workload": self._values()},
            f"{folder}/dlio_config/hydra.yaml": {"hydra": {}},
            f"{folder}/dlio_config/overrides.yaml": [
                f"workload={self.workload}_{self.accelerator}",
                f"++workload.workflow.generate_data={phase == 'datagen'}",
                f"++workload.workflow.train={phase == 'run'}",
                f"++workload.dataset.num_files_train={NUM_FILES}",
                "++workload.dataset.data_folder=/mnt/data",
            ],
        }

    def _metadata(self, phase: str, begin: datetime) -> dict[str, Any]:
        size = {
            "num_files_train": NUM_FILES,
            "num_subfolders_train": 0,
            "total_disk_bytes": NUM_FILES * RECORD_BYTES,
        }
        return ({"dataset": size} if phase == "datasize" else {}) | _metadata(
            self.edition,
            begin,
            benchmark_type="training",
            model=self.workload,
            command=phase,
            accelerator=self.accelerator,
            parameters=self._values(),
            args={
                "hosts": ["node1", "node2"],
                "num_accelerators": NUM_ACCELERATORS,
                "max_accelerators": NUM_ACCELERATORS,
                "client_host_memory_in_gb": HOST_GIB,
                "num_client_hosts": NUM_HOSTS,
                "data_dir": "/mnt/data",
                "results_dir": "/home/acme/results",
            },
        )

    def _summary(self, begin: datetime, rate: float) -> dict[str, Any]:
        return _summary(begin, num_hosts=NUM_HOSTS) | {
            "num_files_train": NUM_FILES,
            "num_samples_per_file": 1,
            "epochs": self._values()["train"]["epochs"],
            "metric": {
                "train_au_percentage": [96.0, 98.0, 97.0, 97.0, 97.0],
                "train_au_mean_percentage": 97.0,
                "train_au_meet_expectation": "success",
                "train_throughput_samples_per_second": epoch_rates(rate),
                "train_throughput_mean_samples_per_second": rate,
                "train_io_mean_MB_per_second": rate * RECORD_BYTES / MIB,
            },
        }


def _checkpointing(edition: str, model: str, begin: datetime, *, writes: int, reads: int) -> dict[str, Any]:
    time = f"{begin:%Y%m%d_%H%M%S}"
    folder = f"{model}/{time}"
    workload = copy.deepcopy(cards()["llama3-8b"].sections)
    workload["checkpoint"] |= {
        "checkpoint_folder": "/mnt/checkpoints",
        "mode": "default",
        "num_checkpoints_write": writes,
        "num_checkpoints_read": reads,
    }
    metric, stats = _checkpoint_figures(begin, writes=writes, reads=reads)
    return {
        f"{folder}/checkpointing_{time}_metadata.json": _metadata(
            edition,
            begin,
            benchmark_type="checkpointing",
            model="llama3-8b",
            command="run",
            accelerator=ACCELERATORS[edition],
            parameters=copy.deepcopy(workload),
            args={
                "hosts": ["node1"],
                "num_processes": 8,
                "num_checkpoints_write": writes,
                "num_checkpoints_read": reads,
                "client_host_memory_in_gb": HOST_GIB,
                "checkpoint_folder": "/mnt/checkpoints",
                "results_dir": "/home/acme/results",
            },
        ),
        **pointer(edition, folder),
        **_printed(folder, "checkpointing_run"),
        **_ranks(folder),
        **sealed(edition, folder),
        **{f"{folder}/{rank}_per_epoch_stats.json": {"1": stats} for rank in range(NUM_ACCELERATORS)},
        f"{folder}/summary.json": _summary(begin, num_hosts=1) | {"metric": metric},
        f"{folder}/dlio_config/config.yaml": {"workload": workload},
        f"{folder}/dlio_config/hydra.yaml": {"hydra": {}},
        f"{folder}/dlio_config/overrides.yaml": [
            "workload=llama3_8b",
            "++workload.checkpoint.checkpoint_folder=/mnt/checkpoints",
            f"++workload.checkpoint.num_checkpoints_write={writes}",
            f"++workload.checkpoint.num_checkpoints_read={reads}",
        ],
    }


def _checkpoint_figures(begin: datetime, *, writes: int, reads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    metric: dict[str, Any] = {"checkpoint_size_GB": CHECKPOINT_GIB}
    now = begin + timedelta(seconds=1)
    stats: dict[str, Any] = {"start": begin.isoformat(), "end": (begin + RUN_TIME).isoformat()}
    for prefix, count in (("save", writes), ("load", reads)):
        durations = [4.0 + number / 4 for number in range(count)]
        rates = [CHECKPOINT_GIB / duration for duration in durations]
        for number, (duration, rate) in enumerate(zip(durations, rates, strict=True), start=1):
            end = now + timedelta(seconds=duration)
            times = {"start": now.isoformat(), "end": end.isoformat()}
            stats[f"{prefix}_ckpt{number}"] = {**times, "duration": duration, "throughput": rate}
            now = end
        if count:
            metric[f"{prefix}_checkpoint_io_mean_GB_per_second"] = fmean(tuple(rates))
            metric[f"{prefix}_checkpoint_duration_mean_seconds"] = fmean(tuple(durations))
    return metric, stats


def _summary(begin: datetime, *, num_hosts: int) -> dict[str, Any]:
    return {
        "start": begin.isoformat(),
        "end": (begin + RUN_TIME).isoformat(),
        "num_accelerators": NUM_ACCELERATORS,
        "num_hosts": num_hosts,
        "host_memory_GB": [HOST_GIB] * num_hosts,
        "host_meminfo": {"MemTotal": f"{int(HOST_GIB) << 20} kB"},
        "host_cpu_count": [64] * num_hosts,
    }


def _metadata(edition: str, begin: datetime, *, parameters: dict[str, Any], **values: Any) -> dict[str, Any]:
    key = "combined_params" if edition == "v2.0" else "parameters"
    metadata: dict[str, Any] = {
        **values,
        "run_datetime": f"{begin:%Y%m%d_%H%M%S}",
        "num_processes": NUM_ACCELERATORS,
        "verification": "CLOSED",
        key: parameters,
        "runtime": RUN_TIME.total_seconds(),
        "exit_status": 0,
        "invocation_start_time": begin.isoformat(),
        "invocation_end_time": (begin + RUN_TIME).isoformat(),
    }
    if edition == "v3.0" and values["command"] == "run":
        metadata["provenance_file"] = "provenance.json"
    return metadata


def _printed(folder: str, name: str) -> dict[str, Any]:
    return {f"{folder}/{name}.{suffix}": "" for suffix in ("stdout.log", "stderr.log")} | {
        f"{folder}/dlio.log": "[OUTPUT] done\n"
    }


def _ranks(folder: str) -> dict[str, Any]:
    return {f"{folder}/0_output.json": {}}


def sealed(edition: str, folder: str) -> dict[str, Any]:
    files: dict[str, Any] = {f"{folder}/fs_separation.json": {"version": 1, "same_filesystem": False}}
    if edition == "v3.0":
        files[f"{folder}/provenance.json"] = {
            "schema": "mlps-run-provenance/1",
            "rules_edition": "3.0",
            "layout_version": 3,
            "tool": {"name": "tool", "version": "1", "code_image": f"md5-tree-v2:{_code_digest()}"},
        }
    return files


def pointer(edition: str, folder: str) -> dict[str, Any]:
    return {f"{folder}/.mlps-code-image": f"md5-tree-v2:{_code_digest()}\n"} if edition == "v3.0" else {}


CODE: Final = {"main.py": "print('the program')\n", "lib/part.py": "PART = 1\n"}


def _code_digest() -> str:
    joined = "".join(name + CODE[name] for name in sorted(CODE))
    return hashlib.md5(joined.encode(), usedforsecurity=False).hexdigest()


def shared_files(edition: str) -> dict[str, Any]:
    systems = {
        f"closed/acme/systems/{SYSTEM}.yaml": {"system_under_test": _described(edition)},
        f"closed/acme/systems/{SYSTEM}.pdf": "%PDF-1.4\n",
    }
    if edition == "v2.0":
        return systems | {"closed/acme/code/main.py": CODE["main.py"]}
    digest = _code_digest()
    image = f"code-images/code-{digest[:8]}"
    return (
        systems
        | {f"{image}/{name}": text for name, text in CODE.items()}
        | {
            "code-images/.mlps-image-pool": "",
            f"{image}/.code-hash.json": {"hash": digest, "algorithm": "md5-tree-v2"},
            "mlperf-results.yaml": {"mlperf_results_version": 2, "orgname": "acme"},
        }
    )


def _described(edition: str) -> dict[str, Any]:
    only_v3 = {"usable_capacity_tib": 100.5, "availability": "available"} if edition == "v3.0" else {}
    return {
        "solution": {
            "submission_name": SYSTEM,
            "friendly_description": "A fast storage",
            **only_v3,
            "architecture": {
                "storage_location": "remote",
                "benchmark_API": "file",
                "product_API": "file",
                "client_footprint": "open_source",
                "client_installation": "in_box",
            },
            "capabilities": {
                "multi_host": True,
                "simultaneous_write": True,
                "simultaneous_read": True,
                "remap_time_in_seconds": 0,
            },
        },
        "deployment": "onprem",
        "total_rack_units": 4,
        "product_nodes": [_storage_nodes()],
        "clients": [
            {
                "friendly_description": "A client",
                "quantity": NUM_HOSTS,
                "chassis": {
                    "model_name": "Box",
                    "cpu_model": "Processor",
                    "cpu_qty": 2,
                    "cpu_cores": 32,
                    "memory_capacity": int(HOST_GIB),
                },
                "networking": [
                    {"unit_count": 2, "type": "ethernet", "state": "up", "speed": 200, "traffic": ["data"]}
                ],
                "operating_system": {"name": "Linux", "version": "6.1"},
            }
        ],
    }


def _storage_nodes() -> dict[str, Any]:
    return {
        "friendly_description": "A storage node",
        "quantity": 2,
        "chassis": {
            "model_name": "Box",
            "rack_units": 2,
            "cpu_model": "Processor",
            "cpu_qty": 1,
            "cpu_cores": 64,
            "memory_capacity": 512,
            "power": {
                "min_psus_active": 1,
                "psus_configured": [{"unit_count": 2, "inlet_voltage": 240, "nameplate_power_watts": 1600}],
            },
        },
    }


def finished(files: dict[str, Any], edition: str) -> Round:
    """With the manifest, which names all leaves."""
    home = "closed/acme"
    if edition == "v3.0":
        leaves = sorted({path.rsplit("/", 1)[0] for path in files if path.endswith("_metadata.json")})
        files[f"{home}/submission.yaml"] = {
            "schema": "mlps-submission-manifest/1",
            "org": "acme",
            "division": "closed",
            "rules_edition": "3.0",
            "layout_version": 3,
            "runs": [{"leaf": leaf.removeprefix(f"{home}/")} for leaf in leaves],
        }
    return Round(files=files, edition=edition)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, indent=1)  # which is YAML as well, and far faster to write
