"""Planned operations on real storages: order, damage, memory, ranks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.rank_threads import ThreadComm, on_ranks
from tests.support.s3.server import BUCKET, S3Server
from tests.support.slow_storages import Throttled

from penstock.cli import main
from penstock.cluster.comm import SoloComm
from penstock.errors import OutOfSpace, StorageError
from penstock.kvcache.block_trace import generate_trace
from penstock.kvcache.cache_figures import is_limited_by_client, say_doubts
from penstock.kvcache.cache_pages import make_run_page
from penstock.kvcache.cache_run import CacheRequest, CacheResult, run_plan, sync_entry_names
from penstock.kvcache.entries import FOOTER_BYTES, EntryLayout, EntryOutcome, LayoutName, make_footer
from penstock.kvcache.io_engine import EngineSettings, IoEngine
from penstock.kvcache.io_plan import OPERATION, IoPlan, ObjectLayout, Op, Operations, TierSizes, plan_blocks
from penstock.kvcache.models import MODELS
from penstock.progress import Progress
from penstock.reports.page import render_report
from penstock.storage import Storage, open_storage
from penstock.storage.files.file_storage import FileOptions, FileStorage, reclaim_unfinished
from penstock.storage.files.system_calls import REAL_CALLS
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import WrappedStorage
from penstock.storage.uri import Location

SMALL = replace(MODELS["tiny-1b"], layers=1, kv_heads=1, head_dim=4)


def small_plan(requests: int = 60, storage: int | None = 40, layout: ObjectLayout | None = None) -> IoPlan:
    trace = generate_trace(requests=requests, most_input_tokens=8_000)
    return plan_blocks(trace, SMALL, tiers=TierSizes(storage=storage), layout=layout)


def rows(*steps: tuple[Op, int], size: int = 20_000) -> Operations:
    operations = np.zeros(len(steps), OPERATION)
    operations["op"], operations["entry"] = zip(*steps, strict=True)
    operations["bytes"], operations["tier"] = size, 2
    return operations


def execute(storage: Storage, operations: Operations, **settings: Any) -> Any:
    layout = settings.pop("layout", EntryLayout(namespace="test"))
    engine = IoEngine(storage, operations, layout, EngineSettings(**settings))
    engine.run()
    return engine


class JitteryStorage(WrappedStorage):
    """Every call takes another time, so that streams overtake each other wherever they can."""

    def create(self, key: str, size_bytes: int | None = None) -> Any:
        time.sleep(hash(key) % 7 * 1e-4)
        return self.inside.create(key, size_bytes)

    def delete(self, key: str) -> None:
        time.sleep(hash(key) % 5 * 1e-4)
        self.inside.delete(key)


@pytest.mark.parametrize("streams", [1, 8, 64])
def test_streams_never_reorder_what_depends_on_each_other(streams: int) -> None:
    plan = small_plan()
    engine = execute(JitteryStorage(MemoryStorage()), plan.in_storage, streams=streams)
    assert (engine.timed["outcome"] == EntryOutcome.DONE).all()
    reads = (plan.in_storage["op"] == Op.READ).sum()
    assert reads > 10


@pytest.mark.parametrize("chunk_bytes", [4096, 5000, 1 << 20])
@pytest.mark.parametrize("layout", ["penstock", "vllm", "lmcache"])
def test_objects_in_chunks_come_back_whole(tmp_path: Path, chunk_bytes: int, layout: LayoutName) -> None:
    storage = open_storage(str(tmp_path), {})
    names = EntryLayout(name=layout, namespace="test", model="meta/llama", chunk_tokens=256)
    operations = rows(*((op, entry) for op in (Op.WRITE, Op.READ) for entry in range(3)))
    engine = execute(storage, operations, layout=names, chunk_bytes=chunk_bytes, streams=2)
    assert (engine.timed["outcome"] == EntryOutcome.DONE).all()
    sizes = {info.size_bytes for info in storage.list()}
    assert sizes == {20_000 + (FOOTER_BYTES if layout == "penstock" else 0)}
    assert engine.resident[2] == 3 * sizes.pop()
    keys = [info.key for info in storage.list()]
    if layout == "vllm":
        assert all(key.startswith("meta_llama_") and key.endswith(".bin") for key in keys)
        assert all(key.split("/")[1] == key.split("/")[3][:3] for key in keys)
    if layout == "lmcache":
        assert all(key.startswith("meta-llama@1@0@") and key.endswith("@half.pt") for key in keys)


def damaged(content: bytearray, kind: str, key: str) -> bytes | None:
    half = len(content) // 2
    if kind == "missing":
        return None
    if kind == "truncated":
        return bytes(content[:half])
    if kind == "torn":
        return bytes(content[:half]) + bytes(len(content) - half)
    if kind == "lost page":
        return bytes(content[:4096]) + bytes(4096) + bytes(content[8192:])
    if kind == "foreign":
        return bytes(content[:20_000]) + make_footer(key + "x", 20_000, bytes(16))
    place = {"flipped": half, "flipped footer": len(content) - FOOTER_BYTES + 20, "flipped end": -1}[kind]
    content[place] ^= 4
    return bytes(content)


NAMES = {"lost page": "torn", "flipped footer": "flipped", "flipped end": "flipped"}


@pytest.mark.parametrize(
    "kind",
    ["missing", "truncated", "torn", "lost page", "flipped", "flipped footer", "flipped end", "foreign"],
)
def test_damaged_entries_are_misses_with_a_name(tmp_path: Path, kind: str) -> None:
    storage, layout = open_storage(str(tmp_path), {}), EntryLayout(namespace="test")
    execute(storage, rows(*((Op.WRITE, entry) for entry in range(3))))
    path = tmp_path / layout.key(1, 0)
    content = damaged(bytearray(path.read_bytes()), kind, layout.key(1, 0))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    engine = execute(storage, rows(*((Op.READ, entry) for entry in range(3))))
    expected = EntryOutcome[NAMES.get(kind, kind).upper()]
    assert engine.timed["outcome"].tolist() == [EntryOutcome.DONE, expected, EntryOutcome.DONE]


def test_a_stream_that_fails_ends_the_others() -> None:
    class FullStorage(WrappedStorage):
        def create(self, key: str, size_bytes: int | None = None) -> Any:
            raise StorageError("The disk is full")

    with pytest.raises(StorageError, match="full"):
        execute(FullStorage(MemoryStorage()), small_plan().in_storage)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvcache")]


def test_open_loop_begins_at_the_workloads_times_and_reports_lag() -> None:
    operations = rows(*((Op.WRITE, entry) for entry in range(4)))
    operations["time_s"] = [0, 0.1, 0.2, 30]
    engine = execute(MemoryStorage(), operations, speedup=2, duration_s=0.12, streams=1)
    begun = engine.timed["begin_ns"][:3] / 1e9
    assert (begun >= np.array([0, 0.05, 0.1])).all()
    assert (engine.timed["lag_ns"][:3] >= 0).all()


def run_on(ranks: int, plan: IoPlan, folder: Path, **settings: Any) -> CacheResult:
    """One run on ranks that are threads, each with a store of its own: entries belong to ranks."""

    def program(comm: ThreadComm) -> CacheResult:
        request = CacheRequest(
            results=folder,
            plan=plan,
            layout=EntryLayout(namespace="test", parts=plan.parts),
            engine=EngineSettings(**settings),
            measures_ceiling=comm.size == 1,
        )
        return run_plan(request, MemoryStorage(), comm=comm, progress=Progress())

    return on_ranks(ranks, program, hosts=["host"] * ranks)[0]


def test_runs_do_the_same_on_any_number_of_ranks_and_streams(tmp_path: Path) -> None:
    plan = small_plan(layout=ObjectLayout(is_per_layer=True))
    results = [
        run_on(ranks, plan, tmp_path / f"{ranks}", streams=streams)
        for ranks, streams in ((1, 1), (2, 8), (4, 64))
    ]
    assert all(result.is_right for result in results)
    facts = {
        (
            result.document["plan"]["digest"],
            result.document["read"]["bytes"],
            result.document["write"]["bytes"],
            result.document["requests"]["load_ms"]["count"],
        )
        for result in results
    }
    assert len(facts) == 1
    [folder] = (tmp_path / "1").glob("kvcache-*")
    assert (folder / "kvcache.json").is_file()
    assert results[0].document["ceiling"]["read_gib_per_s"] > 0
    assert "operations" in render_report(make_run_page(results[0].document))


def test_parts_of_the_time_add_up_to_the_whole(tmp_path: Path) -> None:
    trace = generate_trace(requests=40, most_input_tokens=8_000)
    plan = plan_blocks(trace, SMALL, tiers=TierSizes(gpu=5, cpu=20), layout=ObjectLayout(is_per_layer=True))
    [one, two] = [run_on(ranks, plan, tmp_path / f"{ranks}").document for ranks in (1, 2)]
    planned = one["over_workload"]
    assert planned == two["over_workload"]
    assert sum(row["chunks"] for row in planned) == trace.num_blocks
    assert sum(row["requests"] for row in planned) == trace.num_requests
    for tier, read_bytes in one["plan"]["hit_bytes_by_tier"].items():
        assert sum(row[f"{tier}_read_bytes"] for row in planned) == read_bytes
    for document in (one, two):
        for name in ("read", "write"):
            assert sum(row[f"{name}_bytes"] for row in document["over_run"]) == document[name]["bytes"]
    slowest = max(row["write_p95_ms"] or 0.0 for row in one["over_run"])
    assert slowest <= one["write"]["latency_ms"]["max"] * 1.1


@pytest.mark.parametrize("layout", ["penstock", "vllm", "lmcache"])
def test_a_run_leaves_the_store_as_it_was(layout: str, tmp_path: Path) -> None:
    store, words = tmp_path / "store", ["--requests", "20", "--scale", "1/10000", "--layout", layout]
    command = ["kvcache", "run", "--to", str(store), "--results", str(tmp_path / "runs"), *words]
    assert main(command) == 0
    assert not store.exists()
    (store / "mine").mkdir(parents=True)
    assert main(command) == 0
    assert list(store.rglob("*")) == [store / "mine"]


def test_a_run_is_recorded_where_other_commands_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["kvcache", "run", "--to", "store", "--requests", "5", "--scale", "1/10000"]) == 0
    [recorded] = (tmp_path / "runs").glob("kvcache-*")
    capsys.readouterr()
    assert main(["results", "ls", "--json"]) == 0
    assert recorded.name in capsys.readouterr().out


def test_a_search_sustains_no_more_than_was_answered(tmp_path: Path) -> None:
    trace = generate_trace(requests=60, users=6, most_input_tokens=2_000)
    plan = plan_blocks(trace, SMALL, tiers=TierSizes())
    request = CacheRequest(
        results=tmp_path,
        plan=plan,
        layout=EntryLayout(namespace="test", parts=plan.parts),
        engine=EngineSettings(streams=8),
        measures_ceiling=False,
        objective_ms=60_000.0,
        users=6,
    )
    storage = Throttled(MemoryStorage(), rate_per_s=500, latency_s=0.0)
    found = run_plan(request, storage, comm=SoloComm(), progress=Progress()).document["sustained"]
    most_users = 6 * 500 * trace.arrival_s[-1] / len(plan.in_storage)
    # A busy machine sustains less, but none more.
    assert 0 < found["users"] < 1.1 * most_users


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--requests", "1"], "reads nothing from storage"),
        (["--requests", "50", "--gpu", "10TiB"], "reads nothing from storage"),
        (["--requests", "50", "--duration", "1s"], "shorter than its objective"),
    ],
)
def test_a_search_that_cannot_be_answered_is_refused(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["kvcache", "run", "--to", str(tmp_path / "kv"), "--results", str(tmp_path), *words]
    assert main([*command, "--scale", "1/10000", "--objective", "2s"]) == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_ledger_of_a_run_counts_what_was_read_and_written(tmp_path: Path) -> None:
    plan = small_plan()
    request = CacheRequest(
        results=tmp_path / "results",
        plan=plan,
        layout=EntryLayout(namespace="test", parts=plan.parts),
        engine=EngineSettings(streams=2),
    )
    storage = open_storage(str(tmp_path / "cache"), {})
    document = run_plan(request, storage, comm=SoloComm(), progress=Progress()).document
    for delivery in document["deliveries"]:
        moved_bytes = document[delivery["direction"]]["bytes"]
        num_operations = document["plan"][f"{delivery['direction']}s"]["operations"]
        assert delivery["application_bytes"] == moved_bytes + num_operations * FOOTER_BYTES > 0


def test_a_run_is_limited_by_a_client_that_needs_most_of_its_time_in_memory(tmp_path: Path) -> None:
    document = run_on(1, small_plan(), tmp_path).document
    both = {f"{name}_gib_per_s": document[name]["gib_per_s"] for name in ("read", "write")}

    def at(share: float) -> dict[str, Any]:
        return {**document, "ceiling": {name: 2 * rate / share for name, rate in both.items()}}

    # Each direction has half of its ceiling, and both of them all of the time.
    assert [is_limited_by_client(at(share)) for share in (0.5, 0.9, 2.0)] == [False, True, False]
    assert "needs 90% of the run's time" in " ".join(say_doubts(at(0.9)))
    assert "the ceiling does not count" in " ".join(say_doubts(at(2.0)))
    assert "ceiling" not in " ".join(say_doubts(at(0.5)))


def test_runs_without_reads_from_storage_say_so(tmp_path: Path) -> None:
    trace = generate_trace(requests=20, most_input_tokens=2_000)
    plan = plan_blocks(trace, SMALL, tiers=TierSizes(gpu=10_000, storage=0))
    assert run_on(1, plan, tmp_path).document["kind"] == "memory tiers only"


WRITER = """
import sys
from tests.integration.kvcache.test_io_engine import execute, rows, Op
from penstock.storage import open_storage
print("ready", flush=True)
execute(open_storage(sys.argv[1], {}), rows(*((Op.WRITE, entry) for entry in range(10**4)), size=1 << 20))
"""


def kill_writer(folder: Path) -> None:
    """A process that writes entries, killed in the middle."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    while sum(1 for _ in folder.rglob("*.kv")) < 5:
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()


def test_what_a_killed_writer_left_is_reclaimed_and_all_else_is_whole(tmp_path: Path) -> None:
    kill_writer(tmp_path)
    storage = open_storage(str(tmp_path), {})
    assert reclaim_unfinished(storage, older_than_s=600) == 0
    reclaim_unfinished(storage, older_than_s=0)
    assert not list(tmp_path.rglob(".penstock-*"))
    num_stored = sum(1 for _ in storage.list())
    # Those in flight are not there, but some that were begun after them are.
    operations = rows(*((Op.READ, entry) for entry in range(num_stored + 64)), size=1 << 20)
    engine = execute(storage, operations)
    counts = Counter(engine.timed["outcome"].tolist())
    assert counts == {EntryOutcome.DONE: num_stored, EntryOutcome.MISSING: 64}


def test_no_operation_begins_if_ctrl_c_arrives_while_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **named: Any) -> Any:
            super().submit(*arguments, **named)
            time.sleep(0.2)
            raise KeyboardInterrupt

    monkeypatch.setattr("penstock.kvcache.io_engine.ThreadPoolExecutor", Interrupted)
    storage = open_storage(str(tmp_path), {})
    engine = IoEngine(
        storage, rows((Op.WRITE, 1), (Op.WRITE, 2)), EntryLayout(namespace="test"), EngineSettings()
    )
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert engine.num_begun == 0
    assert list(storage.list()) == []


@pytest.mark.parametrize("pace", [("60", "0.001"), ("10000", "0")], ids=["open loop", "closed loop"])
def test_ctrl_c_ends_a_run_whose_other_operations_have_not_begun(
    tmp_path: Path, pace: tuple[str, str]
) -> None:
    command = [sys.executable, "-P", "-m", "penstock", "kvcache", "run", "--to", f"{tmp_path}/kv", "--scale"]
    command += ["1/1000", "--results", f"{tmp_path}/runs", "--requests", pace[0], "--speedup", pace[1]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            while not any(tmp_path.glob("kv/**/*.kv")):
                assert running.poll() is None
                time.sleep(0.01)
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert "Traceback" not in said
    assert not [path for path in tmp_path.glob("kv/**/*") if path.is_file()]


def test_a_run_begins_with_none_of_its_entries_and_leaves_those_of_others(tmp_path: Path) -> None:
    plan, storage = small_plan(requests=15), open_storage(str(tmp_path / "store"), {})
    layout = EntryLayout(namespace="test", parts=plan.parts)
    written = plan.in_storage[plan.in_storage["op"] == Op.WRITE]
    execute(storage, written[:20], layout=layout)
    execute(storage, rows((Op.WRITE, 1), (Op.WRITE, 2)), layout=EntryLayout(namespace="other"))
    request = CacheRequest(
        results=tmp_path, plan=plan, layout=layout, engine=EngineSettings(), measures_ceiling=False
    )
    [result] = on_ranks(1, lambda comm: run_plan(request, storage, comm=comm, progress=Progress()))
    found = [result.document[name] for name in ("left_entries", "other_objects", "other_bytes")]
    assert found == [20, 2, 2 * (20_000 + FOOTER_BYTES)]
    assert sum(1 for _ in storage.list()) == 2


def test_bytes_are_synced_before_an_entry_is_visible_and_names_once_where_entries_are_kept(
    tmp_path: Path,
) -> None:
    calls: list[tuple[str, str]] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls.append(("folder" if path.is_dir() else "file", str(path)))
        os.fsync(descriptor)

    def rename(old: str, new: str) -> None:
        calls.append(("rename", old))
        Path(old).rename(new)

    recorded = replace(REAL_CALLS, fsync=fsync, rename=rename)
    root = tmp_path / "store"
    location = Location("file", str(root))
    storage = FileStorage(location, FileOptions(), calls=recorded)
    written = rows((Op.WRITE, 1), (Op.WRITE, 2))
    execute(storage, written, streams=1)
    folders = {str(path.parent) for path in root.rglob("*.kv")}
    made = {str(tmp_path)}  # the root's own name is always kept
    assert [kind for kind, path in calls if path not in made] == ["file", "rename"] * 2
    assert [path for kind, path in calls if kind == "file"] == [
        path for kind, path in calls if kind == "rename"
    ]
    calls.clear()
    sync_entry_names(storage, written, EntryLayout(namespace="test"))
    assert {path for _, path in calls} == {*folders, str(root)}
    assert {kind for kind, _ in calls} == {"folder"}


def test_a_cache_that_has_no_room_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    trace = generate_trace(requests=30_000)
    plan = plan_blocks(trace, MODELS["llama2-7b"], tiers=TierSizes())
    request = CacheRequest(
        results=tmp_path, plan=plan, layout=EntryLayout(namespace="test"), engine=EngineSettings()
    )
    storage = open_storage(str(tmp_path / "store"), {})
    with pytest.raises(OutOfSpace, match=r"takes .* TiB, but only") as raised:
        on_ranks(1, lambda comm: run_plan(request, storage, comm=comm, progress=Progress()))
    assert "--capacity" in str(raised.value.fix)
    assert not list((tmp_path / "store").glob("*"))


def test_capacity_means_bytes_on_storage_at_any_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--to", str(tmp_path / "kv"), "--results", str(tmp_path), "--requests", "40"]
    assert main(["kvcache", "run", *where, "--scale", "1/1024", "--capacity", "1MiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["chunk_bytes"] == 32 << 10
    assert plan["capacity_bytes"] == 1 << 20
    assert plan["writes"]["bytes"] > 1 << 20


def test_objects_of_a_service_are_read_and_written_by_the_same_path(moto: S3Server, tmp_path: Path) -> None:
    storage = open_storage(f"s3://{BUCKET}/kvcache", moto.environment)
    plan = small_plan(requests=15)
    request = CacheRequest(
        results=tmp_path,
        plan=plan,
        layout=EntryLayout(namespace="test"),
        engine=EngineSettings(streams=4, chunk_bytes=8192),
        measures_ceiling=False,
    )
    [result] = on_ranks(1, lambda comm: run_plan(request, storage, comm=comm, progress=Progress()))
    assert result.is_right
    counted = result.document["storage_counters"]
    objects = plan.document()["writes"]
    assert counted["written_bytes"] == objects["bytes"] + FOOTER_BYTES * objects["operations"]
    assert result.document["cold"]["path"] == "no page cache"
    assert not list(storage.list())
