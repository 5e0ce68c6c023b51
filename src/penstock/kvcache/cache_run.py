"""A run of a plan from start to finish: reclaim, measure the ceiling, execute, reconcile, record.

Collective: every rank calls `run_plan` and gets the same result. Entries are removed at the end, even after
an interruption, unless the request keeps them. Whatever a killed run leaves behind, the next run removes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from penstock.bench.page_cache_eviction import CacheEviction
from penstock.bench.recorded_run import DeviceObserver, RunSettings
from penstock.cluster.comm import Comm, run_on_all_ranks
from penstock.errors import ObjectNotFound, UsageError
from penstock.kvcache import cache_figures
from penstock.kvcache.cache_figures import FILE, FORMAT_VERSION, Times
from penstock.kvcache.entries import MISSES, EntryLayout
from penstock.kvcache.io_engine import EngineSettings, IoEngine, count_requests
from penstock.kvcache.io_plan import OPERATION, IoPlan, Op, Operations, TierNumber
from penstock.progress import Progress
from penstock.results import counter_files, published_files
from penstock.results.provenance import peak_rss_bytes
from penstock.storage import Counters, Storage, capabilities, volumes
from penstock.storage.files.file_storage import STALE_S, reclaim_unfinished
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import write_object
from penstock.workload.spec import Workload

_REMOVERS: Final = 16


def remove_leftovers(storage: Storage, operations: Operations, layout: EntryLayout) -> dict[str, int]:
    """Bring the store into the state that a plan expects: without any entry that its operations write.

    Returns the number of the plan's entries, which were removed, and the number and bytes of other objects.
    """
    own: frozenset[str] | None = None
    left: list[str] = []
    other_objects = other_bytes = 0
    with suppress(ObjectNotFound):
        for info in storage.list(layout.folder):
            # Entries are named only if the store is not empty, because there may be very many.
            own = own if own is not None else _written_keys(operations, layout)
            if info.key in own:
                left.append(info.key)
            else:
                other_objects += 1
                other_bytes += info.size_bytes
    _remove(storage, left, Progress())
    return {"left_entries": len(left), "other_objects": other_objects, "other_bytes": other_bytes}


def remove_entries(
    storage: Storage,
    operations: Operations,
    layout: EntryLayout,
    progress: Progress,
    *,
    side_files: Iterable[str] = (),
) -> None:
    """Remove all objects that these operations write, `side_files`, and folders that are then empty.

    Any that do not exist are ignored.
    """
    _remove(storage, _written_keys(operations, layout).union(side_files), progress)


def sync_entry_names(storage: Storage, operations: Operations, layout: EntryLayout) -> None:
    """Make the names of written entries survive a power cut, as their bytes already do."""
    for folder in ("", *_folders(_written_keys(operations, layout))):
        with suppress(ObjectNotFound):  # not all operations were executed
            capabilities.sync_names(storage, folder)


def _folders(keys: Iterable[str]) -> set[str]:
    """Return the folders below the root in which objects with these keys lie."""
    return {str(folder) for key in keys for folder in PurePosixPath(key).parents[:-1]}


def _written_keys(operations: Operations, layout: EntryLayout) -> frozenset[str]:
    objects = np.unique(operations[operations["op"] == Op.WRITE][["entry", "part"]])
    return frozenset(layout.key(entry, part) for entry, part in objects.tolist())


def _remove(storage: Storage, keys: Collection[str], progress: Progress) -> None:
    def remove(key: str) -> None:
        with suppress(ObjectNotFound):
            storage.delete(key)
        progress.advance(1)

    progress.begin("removing entries", len(keys))
    with ThreadPoolExecutor(_REMOVERS) as pool:
        list(pool.map(remove, keys))
    if (root := capabilities.find_local_root(storage)) is not None:
        for folder in sorted(_folders(keys), reverse=True):  # inner folders before outer ones
            with suppress(OSError):  # has other files, never existed, or another rank was faster
                (root / folder).rmdir()


_DOUBLINGS: Final = 12
_BISECTIONS: Final = 3
_IMPROVED: Final = 0.9
"""If half the load still takes more than this share of the load time, even less load will not help."""
_IDLE: Final = 0.25
_ANSWERED: Final = 0.95
"""With a smaller share, requests were sent faster than they were answered, however long the objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One measured load.

    `answered` is the share of the operations that were over when the last request was sent, 0 if any entry
    was missing or damaged. `in_flight` is the average number of operations that each rank had on storage.
    """

    speedup: float
    requests_per_s: float
    load_p95_ms: float
    lag_p95_ms: float
    answered: float
    in_flight: float = 1.0

    def meets(self, objective_ms: float) -> bool:
        """Return True if the storage kept up within the objective, and every entry was read."""
        return self.answered >= _ANSWERED and max(self.load_p95_ms, self.lag_p95_ms) <= objective_ms


def find_sustained_load(
    measure: Callable[[float], LoadPoint], *, objective_ms: float, first: float = 1.0
) -> tuple[LoadPoint | None, list[LoadPoint]]:
    """Find the largest load that meets the objective, if any; return it with all measured loads.

    Load is a factor on the workload's own pace. It is sustained if the 95th percentile of load times meets
    the objective and so does the lag, because storage that falls behind has not sustained anything. As a run
    may be shorter than the objective, operations must also be over when its last request is sent. The load is
    doubled or halved until it crosses the objective, and then narrowed down to 10 %. If half the load is no
    faster, still smaller loads will not be either: even idle storage misses the objective.
    """
    points = [measure(first)]
    factor = 2.0 if points[0].meets(objective_ms) else 0.5
    for _ in range(_DOUBLINGS):
        points.append(measure(points[-1].speedup * factor))
        if points[-1].meets(objective_ms) is not points[0].meets(objective_ms):
            break
        before, now = points[-2:]
        is_idle = now.in_flight < _IDLE and max(before.lag_p95_ms, now.lag_p95_ms) <= objective_ms
        if factor < 1 and is_idle and now.load_p95_ms > max(objective_ms, _IMPROVED * before.load_p95_ms):
            break
    for _ in range(_BISECTIONS):
        best = _best(points, objective_ms)
        worse = [
            point.speedup
            for point in points
            if not point.meets(objective_ms) and (best is None or point.speedup > best.speedup)
        ]
        if best is None or not worse:
            break
        points.append(measure((best.speedup * min(worse)) ** 0.5))
    return _best(points, objective_ms), points


def _best(points: list[LoadPoint], objective_ms: float) -> LoadPoint | None:
    sustained = (point for point in points if point.meets(objective_ms))
    return max(sustained, key=lambda point: point.speedup, default=None)


_CEILING_BYTES: Final = 64 << 20
_CEILING_OBJECTS: Final = 512
_CEILING_ROUNDS: Final = 4
LONGEST_RUN_S: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest(RunSettings):
    """A request for a run. `prefill_tokens_per_s` is the accelerator's prefill throughput.

    If there is an objective, the run searches for the largest load that meets it; `users` is the number of
    users who send the plan's requests.
    """

    plan: IoPlan
    layout: EntryLayout
    engine: EngineSettings
    prefill_tokens_per_s: float = 20_000.0
    keeps: bool = False
    measures_ceiling: bool = True
    stale_s: float = STALE_S
    objective_ms: float | None = None
    users: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """A run's figures as plain data, and the times from which they were computed."""

    document: dict[str, Any]
    times: Times

    @property
    def is_right(self) -> bool:
        """True if every entry that the plan reads was there and complete."""
        return not self.times.missed_requests.any()


def run_plan(request: CacheRequest, storage: Storage, *, comm: Comm, progress: Progress) -> CacheResult:
    """Execute the plan on all ranks, and record it in a run's folder. Collective."""
    plan = request.plan
    if request.objective_ms is not None:
        _require_answers(request, request.objective_ms)
    with request.open_run(
        Workload(name=f"kvcache-{plan.name}"),
        comm=comm,
        seeds={"content": request.engine.seed},
        plan={
            "kind": "kvcache",
            "access": {"to": storage.uri, "storage": dict(storage.options)},
            "engine": asdict(request.engine),
            **plan.document(),
        },
        progress=progress,
        written=capabilities.find_local_root(storage),
    ) as (run, folder):
        if request.objective_ms is None:
            result = measure_plan(request, storage, folder, comm=comm, progress=progress)
        else:
            result = _search_load(request, storage, folder, comm=comm, progress=progress)
        if run is not None:
            counter_files.gather_counters(folder)
            published_files.write_json(folder, FILE, result.document)
            run.finish(is_right=result.is_right)
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


def measure_plan(
    request: CacheRequest,
    storage: Storage,
    folder: Path,
    *,
    comm: Comm,
    progress: Progress,
    phase: str = "cache operations",
    end_s: float = inf,
) -> CacheResult:
    """Execute the plan like `run_plan`, but without a separate record. Collective.

    `folder` receives the counters of the hosts. What ends after `end_s` does not count as answered.
    """
    plan, operations = request.plan, request.plan.share_of(comm.rank, comm.size)
    left: dict[str, int] = {}
    if comm.rank == 0:  # bring the store into the state that the plan expects, and count what was there
        left["reclaimed_objects"] = reclaim_unfinished(storage, older_than_s=request.stale_s)
        left |= remove_leftovers(storage, plan.in_storage, request.layout)
    left = comm.broadcast(left, awaiting="rank 0 to remove what earlier runs left")
    require_room(storage, plan.most_stored_bytes(comm.size), comm=comm)
    ceiling = _measure_ceiling(request, comm=comm, progress=progress) if request.measures_ceiling else None
    progress.begin(phase, len(operations))
    progress.enter("working", unit="operations", times=comm.size)
    engine = IoEngine(storage, operations, request.layout, request.engine, advance=progress.advance)
    before = count_requests(storage)
    with (
        _left_as_asked(request, storage, operations, engine, comm.rank, progress=progress),
        DeviceObserver(comm, folder, storage) as observer,
    ):
        with observer.during("read"), observer.during("write"):
            run_on_all_ranks(
                comm,
                lambda: engine.run(lambda: comm.barrier(awaiting="all ranks to begin")),
                awaiting="all ranks to finish the cache's operations",
                timeout_s=LONGEST_RUN_S,
            )
        after = count_requests(storage)
        deliveries = [
            observer.deliver("read", after.read_bytes - before.read_bytes),
            observer.deliver("write", after.written_bytes - before.written_bytes),
        ]
    mine = cache_figures.sum_up_rank(operations, engine.timed, plan.num_requests, end_s)
    times = cache_figures.merge_ranks(comm.gather(mine, awaiting="the times of all ranks"))
    counts = cache_figures.count_rank(operations, engine.timed, times.elapsed_ns)
    of_ranks = comm.gather(counts, awaiting="the run over time")
    elapsed_s = times.elapsed_s
    counters = sum(comm.gather(after, awaiting="what the storages of all ranks counted"), Counters())
    document = {
        "format": FORMAT_VERSION,
        "kind": cache_figures.name_kind(plan),
        "target": storage.uri,
        "ranks": comm.size,
        "results_dir": str(folder),
        "plan": plan.document(),
        "engine": asdict(request.engine),
        "layout": request.layout.name,
        "elapsed_s": elapsed_s,
        "operations_done": times.done,
        "read": cache_figures.direction_document(times.read_bytes, elapsed_s, times.reads),
        "write": cache_figures.direction_document(times.written_bytes, elapsed_s, times.writes),
        "requests": {"load_ms": times.loads.document()},
        "lag_ms": times.lags.document() if request.engine.speedup else None,
        "misses": {outcome.name.lower(): times.outcomes[outcome.name.lower()] for outcome in MISSES},
        "time_to_first_token": cache_figures.time_saved_document(
            plan, times, prefill_tokens_per_s=request.prefill_tokens_per_s
        ),
        "over_workload": cache_figures.hits_over_time(plan),
        "over_run": cache_figures.run_over_time(of_ranks, times.elapsed_ns),
        "most_stored_bytes": plan.most_stored_bytes(comm.size),
        **left,
        "ceiling": ceiling,
        "cold": _gather_cold(storage, engine, comm).document(),
        "deliveries": [asdict(delivery) for delivery in deliveries],
        "storage_options": dict(storage.options),
        "storage_counters": counters.record(),
        "peak_rss_bytes": comm.gather(peak_rss_bytes(), awaiting="all ranks' memory"),
    }
    return CacheResult(document=document, times=times)


def require_room(storage: Storage, most_bytes: int, *, comm: Comm) -> None:
    """Fail before the first byte if a local file system has no room for a plan's cache. Collective.

    Hosts may share one file system or have one each, so each needs room for at least its own share.
    """
    hosts = set(comm.gather(comm.host, awaiting="the hosts of all ranks"))
    run_on_all_ranks(
        comm,
        lambda: volumes.require_free_space(
            capabilities.find_local_root(storage),
            most_bytes // len(hosts),
            what="The cache of this plan",
            fix="limit it with --capacity, or shrink its objects with --scale",
        ),
        awaiting="all ranks to look for free space",
    )


@contextmanager
def _left_as_asked(
    request: CacheRequest,
    storage: Storage,
    operations: Operations,
    engine: IoEngine,
    rank: int,
    *,
    progress: Progress,
) -> Iterator[None]:
    """Remove this rank's entries at the end, even after an interruption, or make their names durable.

    The files that the layout's engine keeps next to its entries exist as long as the entries do.
    """
    files = request.layout.side_files() if rank == 0 else {}
    for key, content in files.items():
        write_object(storage, key, [content])
    try:
        yield
    finally:
        if not request.keeps:
            begun = operations[: engine.num_begun]
            remove_entries(storage, begun, request.layout, progress, side_files=files)
    if request.keeps:
        sync_entry_names(storage, operations, request.layout)


def _require_answers(request: CacheRequest, objective_ms: float) -> None:
    """Refuse a search in which no load could show whether it meets the objective."""
    if not (request.plan.in_storage["op"] == Op.READ).any():
        raise UsageError(
            "This workload reads nothing from storage, so no load time can meet an objective",
            fix="Give more --requests, or smaller --gpu and --cpu.",
        )
    duration_s = request.engine.duration_s
    if duration_s is not None and duration_s * 1e3 < objective_ms:
        raise UsageError(
            "Each run of the search would be shorter than its objective",
            fix="Give a --duration of at least 20 objectives, or none.",
        )


def _search_load(
    request: CacheRequest, storage: Storage, folder: Path, *, comm: Comm, progress: Progress
) -> CacheResult:
    """Find the largest load that meets the objective, and return its result. Collective.

    The result so far is written after each load, so that an interrupted search leaves it.
    """
    objective_ms = request.objective_ms
    assert objective_ms is not None
    results: dict[float, CacheResult] = {}
    points: list[LoadPoint] = []
    ceiling = _measure_ceiling(request, comm=comm, progress=progress) if request.measures_ceiling else None
    span_s = float(request.plan.operations["time_s"].max(initial=0.0))

    def sum_up() -> CacheResult:
        best = _best(points, objective_ms)
        result = results[(best or points[-1]).speedup]
        sustained = {
            "objective_ms": objective_ms,
            "users": None if best is None else int(request.users * best.speedup),
            "requests_per_s": None if best is None else best.requests_per_s,
            "points": [asdict(point) | {"meets": point.meets(objective_ms)} for point in points],
        }
        return replace(result, document=result.document | {"ceiling": ceiling, "sustained": sustained})

    def measure(speedup: float) -> LoadPoint:
        engine, end_s = replace(request.engine, speedup=speedup), inf
        if speedup:
            end_s = min(span_s / speedup, engine.duration_s or inf)
            # By this time, storage that is far behind has missed the objective.
            limit_s = 1.1 * span_s / speedup + 20 * objective_ms / 1e3
            engine = replace(engine, duration_s=min(limit_s, engine.duration_s or limit_s))
        at_load = replace(request, engine=engine, measures_ceiling=False)
        phase = f"load {len(results) + 1}, {speedup:.3g} times the pace" if speedup else "the highest load"
        result = results[speedup] = measure_plan(
            at_load, storage, folder, comm=comm, progress=progress, phase=phase, end_s=end_s
        )
        times, due_s = result.times, request.plan.in_storage["time_s"]
        requests = request.plan.num_requests * times.done / len(due_s)
        num_due = int(np.count_nonzero(due_s / speedup <= end_s)) if speedup else len(due_s)
        load_p95_ms = times.loads.percentile_ms(95)
        point = LoadPoint(
            speedup=speedup,
            requests_per_s=requests / times.elapsed_s if times.elapsed_s else 0.0,
            load_p95_ms=load_p95_ms or 0.0,
            lag_p95_ms=times.lags.percentile_ms(95) or 0.0,
            answered=times.answered / num_due if result.is_right and load_p95_ms is not None else 0.0,
            in_flight=(times.reads.sum_ns + times.writes.sum_ns) / max(times.elapsed_ns, 1) / comm.size,
        )
        if speedup:
            points.append(point)
            if comm.rank == 0:
                published_files.write_json(folder, FILE, sum_up().document)
        return point

    first = request.engine.speedup
    if not first:
        # The pace that keeps the storage busy all the time: at small loads, measuring takes long.
        rate = measure(0.0).requests_per_s
        first = rate * span_s / request.plan.num_requests if rate and span_s else 1.0
    find_sustained_load(measure, objective_ms=objective_ms, first=first)
    return sum_up()


def _measure_ceiling(request: CacheRequest, *, comm: Comm, progress: Progress) -> dict[str, Any] | None:
    """Measure the harness limit: these ranks and streams on storage that costs one copy in memory."""
    storage_operations = request.plan.in_storage
    if not len(storage_operations):
        return None
    # Objects are smaller than the plan's if those of all streams would take too much memory.
    most = _CEILING_BYTES // (2 * request.engine.streams)
    size = max(1, min(int(np.median(storage_operations["bytes"])), most))
    num = min(_CEILING_OBJECTS, _CEILING_BYTES // size)
    operations = np.zeros(num * (1 + _CEILING_ROUNDS), OPERATION)
    operations["bytes"], operations["tier"] = size, TierNumber.STORAGE
    operations["entry"] = np.tile(np.arange(num), 1 + _CEILING_ROUNDS)
    operations["op"][:num] = Op.WRITE
    settings = replace(request.engine, speedup=0.0, duration_s=None)
    memory, figures = MemoryStorage(), {}
    progress.begin("the ceiling: objects in memory", len(operations) + num)
    writes, reads = operations[:num], operations[num:]
    # The first writes only warm up memory: pages that no process has used cost more than the copy.
    for name, part in (("write", writes), ("write", writes), ("read", reads)):
        engine = IoEngine(memory, part, request.layout, settings, advance=progress.advance)
        engine.run(lambda: comm.barrier(awaiting="all ranks to begin measuring the ceiling"))
        mine = int(engine.timed["end_ns"].max())
        slowest_ns = max(comm.gather(mine, awaiting="the ceiling of all ranks"))
        figures[f"{name}_gib_per_s"] = comm.size * len(part) * size / cache_figures.GIB / (slowest_ns / 1e9)
    return {"object_bytes": size, **figures}


def _gather_cold(storage: Storage, engine: IoEngine, comm: Comm) -> CacheEviction:
    """Sum up how many of the bytes read were in the page cache: the proof that reads were cold."""
    files = capabilities.find_local_paths(storage)
    counts = comm.gather(engine.resident.tolist(), awaiting="what was in memory")
    if files is None:
        return CacheEviction(path="no page cache")
    if not files.uses_page_cache:
        return CacheEviction(path="past the page cache")
    before, resident, total = (sum(column) for column in zip(*counts, strict=True))
    return CacheEviction(
        path="page cache dropped" if total else "not known",
        before_bytes=before,
        resident_bytes=resident,
        total_bytes=total,
    )
