"""DLIO itself beside us: each trains on the other's data, AU by DLIO's formula, and processor time.

    python benchmarks/dlio.py --dlio /path/to/python               all of it
    python benchmarks/dlio.py --dlio /path/to/python exchanged     each trains on what the other generated
    python benchmarks/dlio.py --dlio /path/to/python cost          CPU seconds a GiB: fork, spawn, ours
    python benchmarks/dlio.py --dlio /path/to/python small         three epochs over 20,000 small files

`--dlio` is the Python of an environment that has `dlio_benchmark`, and TensorFlow for TFRecord. Every
run of ours recomputes utilization and throughput from its own table of steps, in plain Python and by the
formula of DLIO's `statscounter`, and compares them with `summary.json`.

Caches are cold before each epoch of either side. DLIO asks `sudo` to drop all of the machine; here a `sudo`
of ours drops those of the data alone, and its processor time is not counted; that of our own drop is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq

from harness import evict_all
from penstock.storage import open_storage

BESIDE_US = Path(__file__).parent.parent
OURS = (str(Path(sys.executable).parent / "penstock-dlio"),)
FORMATS = ("npz", "npy", "hdf5", "csv", "jpeg", "png", "tfrecord", "indexed_binary", "mmap_indexed_binary")
WORDS = ("workload=default", "++workload.workflow.evaluation=False", "++workload.dataset.num_files_eval=0")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one command took, its children included."""

    cpu_s: float
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class Side:
    """A program with DLIO's command line."""

    name: str
    program: tuple[str, ...]
    environment: dict[str, str]

    def with_path(self, folder: Path) -> Side:
        """The same, with the programs of `folder` found first."""
        return replace(self, environment=self.environment | {"PATH": f"{folder}:{os.environ['PATH']}"})

    def run(self, folder: Path, *words: str) -> Cost:
        """Run it with its results in `folder`; what it printed is shown if it fails."""
        command = [
            *self.program,
            *WORDS,
            *words,
            f"hydra.run.dir={folder}",
            f"++workload.output.folder={folder}",
        ]
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            command,
            env=os.environ | self.environment,
            cwd=folder.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Cost(cpu_s=cpu_s, elapsed_s=time.monotonic() - began_s)


def main() -> int:
    """Print the tables asked for; 1 where something did not agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=("exchanged", "cost", "small"), default=[])
    parser.add_argument("--dlio", required=True, help="the Python of an environment with dlio_benchmark")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--files", type=int, default=20_000, help="small files")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    library = str(Path(sys.prefix, "lib"))  # where pip puts the MPI library that mpi4py looks for
    environment = {"LD_LIBRARY_PATH": library, "TF_CPP_MIN_LOG_LEVEL": "3"}
    dlio = Side(name="DLIO", program=(given.dlio, "-m", "dlio_benchmark.main"), environment=environment)
    ours = Side(name="Penstock", program=OURS, environment={})
    where = os.environ.get("PENSTOCK_BENCH_FOLDER", str(BESIDE_US))
    agree = True
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=where) as folder:
        place = Path(folder)
        if "exchanged" in (given.tables or ("exchanged",)):
            agree &= _exchange(dlio, ours, place, given.formats)
        if "cost" in (given.tables or ("cost",)):
            _compare_cost(dlio, ours, place, given.rounds)
        if "small" in (given.tables or ("small",)):
            _compare_small(dlio, ours, place, given.files, given.rounds)
    return 0 if agree else 1


def _exchange(dlio: Side, ours: Side, place: Path, formats: Sequence[str]) -> bool:
    """Every format, generated by one side and read by the other."""
    print(
        "format                 generated by  trained by  steps   AU %     AU by DLIO's formula, difference"
    )
    agree = True
    for kind in formats:
        for maker, reader in ((ours, dlio), (dlio, ours)):
            data = place / "data"
            shutil.rmtree(data, ignore_errors=True)
            common = (
                f"++workload.dataset.format={kind}",
                f"++workload.framework={'tensorflow' if kind == 'tfrecord' else 'pytorch'}",
                f"++workload.reader.data_loader={'tensorflow' if kind == 'tfrecord' else 'pytorch'}",
                f"++workload.dataset.data_folder={data}",
                "++workload.dataset.num_files_train=16",
                f"++workload.dataset.num_samples_per_file={1 if kind in {'jpeg', 'png', 'npy'} else 4}",
                # pandas takes a second for each row of 64 Ki columns, which is what DLIO reads CSV with.
                f"++workload.dataset.record_length_bytes={4096 if kind == 'csv' else 65536}",
                "++workload.reader.read_threads=2",
                "++workload.reader.multiprocessing_context=fork",
                "++workload.train.epochs=2",
                "++workload.train.computation_time=0.01",
            )
            row = f"{kind:<22} {maker.name:<13} {reader.name:<11}"
            try:
                maker.run(
                    place / "made",
                    *common,
                    "++workload.workflow.generate_data=True",
                    "++workload.workflow.train=False",
                )
                shutil.rmtree(place / "run", ignore_errors=True)
                reader.run(place / "run", *common)
            except RuntimeError as error:
                agree = False
                print(f"{row} FAILED: {str(error).strip().splitlines()[-1][:150]}", flush=True)
                continue
            summary = json.loads((place / "run" / "summary.json").read_text())
            steps = sum(
                len(times)
                for epoch in _epochs(place / "run")
                for name, times in epoch["compute"].items()
                if name.startswith("block")
            )
            text = f"{row} {steps:>5}  {summary['metric']['train_au_mean_percentage']:6.2f}"
            if reader is ours:
                difference = au_difference(place / "run", batch=4)
                agree &= difference <= 1e-9
                text += f"   {difference:.1e}"
            print(text, flush=True)
    return agree


def _epochs(folder: Path) -> Iterator[dict[str, dict[str, list[float]]]]:
    document = json.loads((folder / "0_output.json").read_text())
    return (value for key, value in document.items() if key.isdigit())


def au_difference(folder: Path, *, batch: int, exclude_start: int = 1) -> float:
    """The largest difference between summary.json and DLIO's formula, over all epochs and both figures."""
    steps, spans = (pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("steps", "spans"))
    summary = json.loads((folder / "summary.json").read_text())
    num_ranks = summary["num_accelerators"]
    num_samples = summary["num_files_train"] * summary["num_samples_per_file"]
    num_steps = num_samples // batch // num_ranks
    taken = defaultdict(list)
    for step in steps:
        if step["phase"] == "train":
            taken[step["epoch"], step["rank"], step["block"]].append(step)
    block_s = {
        (span["epoch"], span["rank"], span["block"]): (span["end_ns"] - span["start_ns"]) / 1e9
        for span in spans
        if span["kind"] == "block" and span["phase"] == "train"
    }
    if len({key[0] for key in taken}) != len(summary["metric"]["train_au_percentage"]):
        raise RuntimeError(f"{folder} does not have the steps of all epochs")
    largest = 0.0
    for number, epoch in enumerate(sorted({key[0] for key in taken})):
        au = rate = 0.0
        for rank in range(num_ranks):
            blocks = [key for key in taken if key[:2] == (epoch, rank)]
            weight = sum(len(taken[key]) for key in blocks)
            for key in blocks:
                proc = [(step["computed_ns"] - step["start_ns"]) / 1e9 for step in taken[key]]
                compute = [(step["computed_ns"] - step["loaded_ns"]) / 1e9 for step in taken[key]]
                counted = compute[exclude_start:num_steps]
                whole_s = block_s[key] - sum(proc[:exclude_start]) - sum(proc[num_steps:])
                au += 100 * sum(counted) / whole_s * len(proc) / weight
                rate += len(counted) / whole_s * batch * len(proc) / weight
        found = summary["metric"]
        largest = max(
            largest,
            abs(au / num_ranks - found["train_au_percentage"][number]),
            abs(rate - found["train_throughput_samples_per_second"][number])
            / found["train_throughput_samples_per_second"][number],
        )
    return largest


def _compare_cost(dlio: Side, ours: Side, place: Path, rounds: int) -> None:
    """CPU seconds a GiB read, start-up and imports included and alone: large npz, two workers."""
    data, num_files, size_bytes, epochs = place / "large", 48, 8 << 20, 2
    common = (
        f"++workload.dataset.data_folder={data}",
        f"++workload.dataset.num_files_train={num_files}",
        f"++workload.dataset.record_length_bytes={size_bytes}",
        "++workload.reader.read_threads=2",
        f"++workload.train.epochs={epochs}",
        "++workload.train.computation_time=0.05",
    )
    ours.run(
        place / "made", *common, "++workload.workflow.generate_data=True", "++workload.workflow.train=False"
    )
    print("\nlarge files: CPU seconds a GiB read, all processes, start to end")
    gib = num_files * size_bytes * epochs / GIB
    for _ in range(rounds):
        for side, start, loader in _sides(dlio, ours):
            with _dropping(data, place) as cold:
                cost = side.with_path(cold).run(place / "run", *common, start, loader)
            summary = json.loads((place / "run" / "summary.json").read_text())
            au = summary["metric"]["train_au_mean_percentage"]
            print(
                f"  {side.name:<9} {start.partition('=')[2]:<6} {loader.partition('=')[2]:<8}"
                f" {cost.cpu_s / gib:6.2f} CPU s/GiB  {cost.elapsed_s:6.1f} s  AU {au:6.2f} %",
                flush=True,
            )
            shutil.rmtree(place / "run", ignore_errors=True)


def _compare_small(dlio: Side, ours: Side, place: Path, num_files: int, rounds: int) -> None:
    """CPU seconds of three epochs over many small files, from a cold cache on either side."""
    data = place / "small"
    common = (
        f"++workload.dataset.data_folder={data}",
        f"++workload.dataset.num_files_train={num_files}",
        "++workload.dataset.record_length_bytes=2048",
        "++workload.reader.batch_size=20",
        "++workload.reader.read_threads=2",
        "++workload.train.epochs=3",
        "++workload.train.computation_time=0",
    )
    generate = ("++workload.workflow.generate_data=True", "++workload.workflow.train=False")
    made = ours.run(place / "made", *common, *generate)
    elsewhere = f"++workload.dataset.data_folder={place / 'theirs'}"
    theirs = dlio.run(place / "made", *common, *generate, elsewhere)
    print(
        f"\n{num_files:,} files of 2 KiB: generated in {made.cpu_s:.1f} CPU s, by DLIO in {theirs.cpu_s:.1f}"
    )
    shutil.rmtree(place / "theirs")
    for _ in range(rounds):
        for side, start, loader in _sides(dlio, ours, starts=("fork",)):
            with _dropping(data, place) as cold:
                cost = side.with_path(cold).run(place / "run", *common, start, loader)
            name = f"{side.name:<9} {loader.partition('=')[2]:<10}"
            print(f"  {name} {cost.cpu_s:6.1f} CPU s  {cost.elapsed_s:6.1f} s", flush=True)
            shutil.rmtree(place / "run", ignore_errors=True)


def _sides(
    dlio: Side, ours: Side, starts: Sequence[str] = ("fork", "spawn")
) -> Iterator[tuple[Side, str, str]]:
    torch, native = (f"++workload.reader.data_loader={name}" for name in ("pytorch", "tensorflow"))
    for start in starts:
        word = f"++workload.reader.multiprocessing_context={start}"
        yield dlio, word, torch
        yield ours, word, torch
    yield ours, "++workload.reader.multiprocessing_context=fork", native


@contextlib.contextmanager
def _dropping(data: Path, place: Path) -> Iterator[Path]:
    """A folder with a `sudo` that asks this process to drop the data's pages; they are dropped now, too."""
    storage = open_storage(str(data), {})
    evict_all(storage)
    folder = Path(tempfile.mkdtemp(dir=place))
    ask, answer = folder / "ask", folder / "answer"
    for pipe in (ask, answer):
        os.mkfifo(pipe)
    (folder / "sudo").write_text(f"#!/bin/sh\necho drop > {ask}\nread done < {answer}\n")
    (folder / "sudo").chmod(0o755)

    def serve() -> None:
        while ask.read_text() == "drop\n":
            evict_all(storage)
            answer.write_text("dropped\n")

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield folder
    finally:
        ask.write_text("end\n")
        server.join()


if __name__ == "__main__":
    sys.exit(main())
