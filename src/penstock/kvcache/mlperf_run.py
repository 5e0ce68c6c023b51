"""Runs the options of MLPerf Storage v3.0's key-value cache benchmark, with all trials, on all ranks.

As in the tool, every rank has its own users and cache, seeded by the rank's number. Everything they do is
planned first. Collective: every rank calls `run_mlperf` and gets the same document.
"""

import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from penstock.bench.recorded_run import DeviceObserver, RunSettings
from penstock.cluster.comm import Comm, run_on_all_ranks
from penstock.kvcache import mlperf_files
from penstock.kvcache.cache_figures import FILE, FORMAT_VERSION
from penstock.kvcache.cache_run import LONGEST_RUN_S, remove_entries, remove_leftovers, require_room
from penstock.kvcache.entries import EntryLayout
from penstock.kvcache.io_engine import EngineSettings, IoEngine, count_requests
from penstock.kvcache.io_plan import IoPlan
from penstock.kvcache.mlperf_files import TrialResult, judge_trial
from penstock.kvcache.mlperf_plan import OptionSettings, plan_option
from penstock.kvcache.models import find_model
from penstock.progress import Progress
from penstock.results import counter_files, published_files
from penstock.results.provenance import peak_rss_bytes
from penstock.storage import Storage, capabilities
from penstock.storage.files.file_storage import reclaim_unfinished
from penstock.submission.edition import KvCacheLimits, load_edition
from penstock.workload.spec import Workload


def load_limits() -> KvCacheLimits:
    """Load the requirements of edition v3.0 on key-value caches."""
    limits = load_edition("v3.0").kv_cache
    assert limits is not None, "edition v3.0 has them"
    return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class MlperfRequest(RunSettings):
    """The options and trials of a run. If `duration_s` or `pause_s` is None, the edition's value applies."""

    limits: KvCacheLimits
    engine: EngineSettings
    cache: str
    options: tuple[int, ...] = (1, 2, 3)
    trials: int = 3
    scale: Fraction = Fraction(1)
    duration_s: float | None = None
    pause_s: float | None = None
    capacity_bytes: int | None = None

    def settings(self, number: int, rank: int) -> OptionSettings:
        """Return the settings of one option on one rank."""
        option = self.limits.options[str(number)]
        return OptionSettings(
            number=number,
            option=option,
            model=find_model(option.model),
            seed=self.limits.seed + rank,
            scale=self.scale,
            duration_s=option.duration_s if self.duration_s is None else self.duration_s,
            capacity_bytes=self.capacity_bytes,
        )


def run_mlperf(request: MlperfRequest, storage: Storage, *, comm: Comm, progress: Progress) -> dict[str, Any]:
    """Run all options, and write the tool's files into the run's folder. Collective."""
    plans = {number: plan_option(request.settings(number, comm.rank)) for number in request.options}
    planned = comm.gather(
        {number: plan.document() for number, plan in plans.items()}, awaiting="the plans of all ranks"
    )
    most = max(plan.most_stored_bytes(1) for plan in plans.values())
    require_room(storage, sum(comm.gather(most, awaiting="what all ranks store")), comm=comm)
    with request.open_run(
        Workload(name="kvcache-mlperf-v3"),
        comm=comm,
        seeds={"content": request.engine.seed, "base": request.limits.seed},
        plan={
            "kind": "kvcache",
            "access": {"to": storage.uri, "storage": dict(storage.options)},
            "engine": asdict(request.engine),
            "ranks": planned,
        },
        progress=progress,
        written=capabilities.find_local_root(storage),
    ) as (run, folder):
        began = comm.broadcast(f"{datetime.now(UTC):%Y%m%d_%H%M%S}", awaiting="when the run began")
        model = request.limits.options[str(request.options[0])].model
        leaf = folder / "kv_cache" / model / "run" / began
        with DeviceObserver(comm, folder, storage) as observer:
            before = count_requests(storage)
            with observer.during("read"), observer.during("write"):
                mine = _run_options(request, storage, plans, leaf, comm=comm, progress=progress)
            after = count_requests(storage)
            deliveries = [
                observer.deliver("read", after.read_bytes - before.read_bytes),
                observer.deliver("write", after.written_bytes - before.written_bytes),
            ]
        # Raw latencies stay in each rank's own file.
        summaries = [replace(result, document={"summary": result.summary}) for result in mine]
        gathered = comm.gather(summaries, awaiting="all ranks' results")
        results = [result for of_rank in gathered for result in of_rank]
        document = {
            "format": FORMAT_VERSION,
            "workload": "mlperf-v3",
            "target": storage.uri,
            "ranks": comm.size,
            "scale": str(request.scale),
            "engine": asdict(request.engine),
            "leaf": str(leaf),
            "results_dir": str(folder),
            "durations_s": {str(number): plan.facts["duration_s"] for number, plan in plans.items()},
            "digests": {
                str(number): [of_rank[number]["digest"] for of_rank in planned] for number in request.options
            },
            "options": mlperf_files.honest_figures(results),
            "deliveries": [asdict(delivery) for delivery in deliveries],
            "storage_counters": after.record(),
            "peak_rss_bytes": comm.gather(peak_rss_bytes(), awaiting="all ranks' memory"),
        }
        if run is not None:
            counter_files.gather_counters(folder)
            metadata = _metadata(request, leaf, began, hosts=len(run.record.hosts), ranks=comm.size)
            mlperf_files.write_files(leaf, began, metadata, results)
            published_files.write_json(folder, FILE, document)
            run.finish(deliveries=deliveries)
        return comm.broadcast(document, awaiting="rank 0 to finish the run's files")


def _run_options(
    request: MlperfRequest,
    storage: Storage,
    plans: dict[int, IoPlan],
    leaf: Path,
    *,
    comm: Comm,
    progress: Progress,
) -> list[TrialResult]:
    """Run all options in their trials; each rank writes a file for each trial."""
    if comm.rank == 0:
        reclaim_unfinished(storage)
    results = []
    for position, number in enumerate(request.options):
        if position:
            time.sleep(request.limits.delay_s if request.pause_s is None else request.pause_s)
        plan, settings = plans[number], request.settings(number, comm.rank)
        operations = plan.in_storage
        at_pace = replace(
            request.engine, duration_s=settings.duration_s, most_writers=settings.option.max_allocations
        )
        for trial in range(request.trials):
            progress.begin(f"option {number}, trial {trial + 1} of {request.trials}", len(operations))
            progress.enter("working", unit="operations", times=comm.size)
            layout = EntryLayout(
                namespace=f"mlperf-v3:{number}:{trial}:{settings.seed}", folder=f"rank_{comm.rank}"
            )
            remove_leftovers(storage, operations, layout)
            engine = IoEngine(storage, operations, layout, at_pace, advance=progress.advance)
            wait = partial(comm.barrier, awaiting="all ranks to begin the trial")
            try:
                run_on_all_ranks(
                    comm,
                    partial(engine.run, wait),
                    awaiting="all ranks to finish the trial",
                    timeout_s=LONGEST_RUN_S,
                )
            finally:
                remove_entries(storage, operations[: engine.num_begun], layout, progress)
            result = judge_trial(plan, settings, operations, engine.timed, trial=trial, rank=comm.rank)
            folder = leaf / f"option_{number}" / f"trial_{trial}" / f"rank_{comm.rank}"
            published_files.write_json(folder, f"kvcache_results_{leaf.name}.json", result.document)
            results.append(result)
    return results


def _metadata(request: MlperfRequest, leaf: Path, began: str, *, hosts: int, ranks: int) -> dict[str, Any]:
    """Return the metadata of the run in the tool's terms."""
    first = request.settings(request.options[0], 0)
    commands = [
        mlperf_files.trial_command(
            request.settings(number, 0),
            trial=trial,
            ranks=ranks,
            output=leaf,
            cache=request.cache,
            base_seed=request.limits.seed,
        )
        for number in request.options
        for trial in range(request.trials)
    ]
    return {
        "benchmark_type": "kv_cache",
        "model": first.option.model,
        "command": "run",
        "run_datetime": began,
        "num_processes": ranks,
        "num_client_hosts": hosts,
        "accelerator": None,
        "result_dir": str(leaf),
        "parameters": {
            "model": first.option.model,
            "num_users": first.num_users,
            "duration": first.duration_s,
            "cache_dir": request.cache,
            "generation_mode": first.option.generation,
        },
        "override_parameters": {},
        "exit_status": 0,
        "verification": None,
        "executed_command": " ".join(request.command),
        "about_commands": "command_output_files name each trial in the terms of mlpstorage's tool",
        "command_output_files": [{"command": command} for command in commands],
        "args": {
            "cache_dir": request.cache,
            "results_dir": str(request.results),
            "inter_option_delay": request.limits.delay_s if request.pause_s is None else request.pause_s,
            "seed": request.limits.seed,
            "trials": request.trials,
            "params": None,
        },
    }
