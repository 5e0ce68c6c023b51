"""Whole runs of checkpoints: on files, in memory and on storage that fails, on one rank and on several."""

import errno
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.file_faults import FailFileCall, faulty_calls
from tests.support.rank_threads import on_ranks

from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
from penstock.bench.checkpoint.checkpoint_run import (
    KEY,
    CheckpointRequest,
    change_checkpoint_section,
    read_marker,
    run_checkpoints,
)
from penstock.bench.state_layout import plan_layout
from penstock.cluster.comm import Comm, SoloComm
from penstock.dataset.content import Content
from penstock.errors import OutOfSpace, RankFailed, Unavailable, UsageError
from penstock.progress import Progress
from penstock.results.event_files import read_events
from penstock.results.run_folder import run_folders
from penstock.results.run_record import RunOutcome, read_record
from penstock.results.step_events import SpanKind
from penstock.storage import ObjectInfo, Sink, Storage, open_storage, residency
from penstock.storage.files.file_storage import FileOptions, FileStorage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import WrappedSink, WrappedStorage, exists, read_object, write_object
from penstock.storage.uri import Location
from penstock.testing.faults import FailAtCall, Full, Late
from penstock.transfer.pipeline import PipelineSettings
from penstock.workload.load_workload import load_model
from penstock.workload.settings import parse_settings

SMALL = PipelineSettings(streams=2, chunk_bytes=64 << 10, buffer_memory_bytes=512 << 10)
SCALE = Fraction(1, 100_000)
"""About a megabyte of llama3-8b."""


@dataclass
class Ground:
    """A place for checkpoints, and a folder for results."""

    reopen: Callable[[], Storage]
    results: Path
    said: list[str] = field(default_factory=list)

    def run(
        self,
        *,
        comm: Comm | None = None,
        model: str = "llama3-8b",
        scale: Fraction = SCALE,
        writes: int = 2,
        reads: int = 2,
        settings: tuple[str, ...] = (),
        interval_s: float = 0.0,
        progress: Progress | None = None,
        **fields: Any,
    ) -> CheckpointResult:
        comm = comm or SoloComm()
        asked = change_checkpoint_section(
            load_model(model, overrides=parse_settings(settings)),
            num_checkpoints_write=writes,
            num_checkpoints_read=reads,
            time_between_checkpoints_s=interval_s,
        )
        mode = asked.workload.checkpoint.mode
        layout = plan_layout(asked, num_processes=comm.size, scale=scale, mode=mode)
        request = CheckpointRequest(
            model=asked, layout=layout, scale=scale, pipe=SMALL, results=self.results, **fields
        )
        return run_checkpoints(
            request, self.reopen, comm=comm, progress=progress or Progress(), tell=self.said.append
        )

    def stored(self) -> set[str]:
        return {info.key for info in self.reopen().list()}


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    place = tmp_path / "ckpt"
    place.mkdir()
    return Ground(partial(open_storage, str(place), {}), tmp_path / "runs")


def test_the_interval_lies_between_rounds_and_not_before_the_first(ground: Ground) -> None:
    rounds = ground.run(writes=2, reads=1, interval_s=0.3).rounds
    pauses_s = [after.began_at_s - before.ended_at_s for before, after in pairwise(rounds)]
    assert len(pauses_s) == 2
    assert all(pause_s >= 0.3 for pause_s in pauses_s)


def in_memory(tmp_path: Path, around: Callable[[Storage], Storage]) -> Ground:
    storage = around(MemoryStorage())
    return Ground(lambda: storage, tmp_path / "runs")


def only_run(ground: Ground) -> Path:
    (folder,) = run_folders(ground.results)
    return folder


def test_what_is_written_is_the_keyed_content_in_dlios_files_and_reads_back_right(ground: Ground) -> None:
    result = ground.run()
    names = ("zero_pp_rank_0_mp_rank_0_model_states.pt", "zero_pp_rank_0_mp_rank_0_optim_states.pt")
    wanted = {f"global_epoch1_step{step}/{name}" for step in (1, 2) for name in names}
    assert ground.stored() == wanted | {KEY}
    storage = ground.reopen()
    for key in wanted:
        assert Content(result.seed, key).verify(memoryview(read_object(storage, key))) is None
    document = result.document()
    assert document["write"]["bytes"] == document["read"]["bytes"] == 2 * result.total_bytes
    assert document["read"]["verified_bytes"] == 2 * result.total_bytes
    assert result.is_right


def test_the_document_has_what_the_figures_stand_on(ground: Ground) -> None:
    document = ground.run().document()
    both = {
        "bytes", "duration_s", "gib_per_s", "mean_gib_per_s", "setup_s", "pipeline_s", "drain_s",
        "call_time_sum_s", "storage_busy_s", "store_gib_per_s", "overhead_percent", "p50_ms", "p99_ms",
        "max_ms", "bottleneck", "streams",
    }  # fmt: skip
    writing = {"generate_gib_per_s", "generate_to_store", "generator_stall_s", "writer_stall_s"}
    assert both | writing <= set(document["write"])
    assert both | {"verified_bytes", "verifier_stall_s", "reader_stall_s"} <= set(document["read"])
    for direction in ("write", "read"):
        found = document[direction]
        rate = found["bytes"] / 2**30 / found["duration_s"]
        assert found["gib_per_s"] == pytest.approx(rate)
        assert sum(stream["moved_bytes"] for stream in found["streams"]) == found["bytes"]
        assert {stream["stream"] for stream in found["streams"]} == {0, 1}
        assert all({"requests", "retries", "errors"} <= stream.keys() for stream in found["streams"])
    assert {"bottleneck", "results_dir", "gap_s", "seed"} <= set(document)
    assert [each["direction"] for each in document["checkpoints"]] == ["write", "write", "read", "read"]
    assert json.loads((Path(document["results_dir"]) / "checkpoints.json").read_text()) == document


def test_the_folder_has_dlios_files_with_its_checkpoint_keys(ground: Ground) -> None:
    result = ground.run(writes=3)
    folder = only_run(ground)
    record = read_record(folder)
    assert record.outcome is RunOutcome.FINISHED
    assert record.plan["total_bytes"] == result.total_bytes
    assert record.seeds == {"content": result.seed}
    assert record.workload["checkpoint"]["num_checkpoints_write"] == 3
    metric = json.loads((folder / "summary.json").read_text())["metric"]
    keys = (
        "io_mean_GB_per_second",
        "io_stdev_GB_per_second",
        "duration_mean_seconds",
        "duration_stdev_seconds",
    )
    assert set(metric) == {f"{verb}_checkpoint_{key}" for verb in ("save", "load") for key in keys} | {
        "checkpoint_size_GB"
    }
    assert metric["checkpoint_size_GB"] == result.total_bytes / 2**30
    assert metric["save_checkpoint_duration_mean_seconds"] > 0
    stats = json.loads((folder / "0_per_epoch_stats.json").read_text())["1"]
    assert {"save_ckpt1", "save_ckpt2", "save_ckpt3", "load_ckpt1", "load_ckpt2"} <= set(stats)
    assert not (folder / "progress").exists()


def test_before_reads_the_files_are_out_of_memory_by_the_kernels_count(ground: Ground) -> None:
    result = ground.run()
    for each in result.rounds:
        if each.round.direction == "read":
            assert each.cold is not None
            assert each.cold.path == "page cache dropped"
            assert each.cold.total_bytes == result.total_bytes
            assert each.is_from_memory == (each.cold.resident_share > 0.01)


def test_a_read_that_memory_served_has_no_throughput_of_storage(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.posix_fadvise", lambda *_: None)  # as on a file system that keeps its pages
    result = ground.run(writes=1, reads=1)
    document = result.document()
    assert result.is_from_memory
    assert document["from_memory"] is document["read"]["from_memory"] is True
    assert document["read"]["gib_per_s"] is document["read"]["mean_gib_per_s"] is None
    assert document["read"]["memory_gib_per_s"] > 0
    assert document["read"]["bottleneck"] == "page cache"
    assert document["write"]["gib_per_s"] > 0


def test_where_the_kernel_does_not_tell_a_read_is_not_called_cold(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> None:
        raise Unavailable("This kernel does not report which pages are resident")

    monkeypatch.setattr(residency, "evict_files", silent)
    result = ground.run(writes=1, reads=1)
    assert result.is_right
    assert result.is_from_memory
    assert result.document()["checkpoints"][1]["cold"]["path"] == "not known"


class SlowEnd(WrappedStorage):
    """Takes bytes at once, and is durable a quarter of a second later."""

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return _SlowEndSink(self.inside.create(key, size_bytes))


class _SlowEndSink(WrappedSink):
    def finish(self) -> ObjectInfo:
        time.sleep(0.25)
        return self.inside.finish()


def test_storage_that_is_durable_late_has_its_drain_counted(tmp_path: Path) -> None:
    ground = in_memory(tmp_path, SlowEnd)
    write = ground.run(writes=1, reads=0).document()["write"]
    assert write["duration_s"] >= 0.25
    assert write["drain_s"] >= 0.2
    assert write["gib_per_s"] == pytest.approx(write["bytes"] / 2**30 / write["duration_s"])


def test_storage_that_acknowledges_only_at_the_end_cannot_take_more_than_the_buffers(tmp_path: Path) -> None:
    """The pipe says so instead of hanging, and nothing of the checkpoint stays."""
    ground = in_memory(tmp_path, Late)
    settings = PipelineSettings(streams=1, chunk_bytes=64 << 10, buffer_memory_bytes=128 << 10, silence_s=0.3)
    asked = change_checkpoint_section(
        load_model("llama3-8b"), num_checkpoints_write=1, num_checkpoints_read=0
    )
    layout = plan_layout(asked, num_processes=1, scale=SCALE)
    request = CheckpointRequest(
        model=asked, layout=layout, scale=SCALE, pipe=settings, results=ground.results
    )
    with pytest.raises(RankFailed, match="Rank 0"):
        run_checkpoints(request, ground.reopen, comm=SoloComm(), progress=Progress())
    assert ground.stored() == set()


class LostPart(WrappedStorage):
    """Its objects miss a part that was acknowledged, and it says so at the end."""

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return (
            _LossySink(self.inside.create(key))
            if key.endswith("optim_states.pt")
            else self.inside.create(key)
        )


class _LossySink(WrappedSink):
    num_parts = 0

    def submit(self, buffer: memoryview, release: Callable[[], None] | None = None) -> None:
        self.num_parts += 1
        if self.num_parts != 2:
            self.inside.submit(buffer, release)
        elif release is not None:
            release()


def test_a_lost_part_fails_the_run_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    ground = in_memory(tmp_path, LostPart)
    with pytest.raises(RankFailed, match="optim_states"):
        ground.run(writes=2, reads=2)
    assert ground.stored() == set()
    record = read_record(only_run(ground))
    assert record.outcome is RunOutcome.FAILED
    assert "optim_states" in record.why


def test_a_full_disk_ends_the_run_names_the_file_and_keeps_whole_checkpoints(tmp_path: Path) -> None:
    """Eighteen writes a checkpoint, and one for the marker: the disk fills up in the second one."""
    calls = faulty_calls(FailFileCall.and_all_after("pwrite", 24, errno.ENOSPC))
    location = Location("file", str(tmp_path / "ckpt"))
    storage = FileStorage(location, FileOptions(fsync=False), calls=calls)
    ground = Ground(lambda: storage, tmp_path / "runs")
    with pytest.raises(RankFailed, match=r"ckpt/global_epoch1_step2/zero_pp_rank_0_mp_rank_0_.*_states\.pt"):
        ground.run(writes=3, reads=3)
    assert {key.partition("/")[0] for key in ground.stored()} == {"global_epoch1_step1", KEY}
    assert list((tmp_path / "ckpt" / "global_epoch1_step2").iterdir()) == []
    marker = read_marker(ground.reopen())
    assert marker is not None
    assert marker.step_numbers == (1,)


def test_a_full_object_store_keeps_whole_checkpoints_alone(tmp_path: Path) -> None:
    capacity = int(1.6 * 14 * 8_030_261_248 * SCALE)
    ground = in_memory(tmp_path, partial(Full, capacity_bytes=capacity))
    with pytest.raises(RankFailed, match="do not fit"):
        ground.run(writes=3, reads=3)
    assert {key.partition("/")[0] for key in ground.stored()} == {"global_epoch1_step1", KEY}


def test_too_little_room_is_found_before_the_first_byte(ground: Ground) -> None:
    with pytest.raises((OutOfSpace, RankFailed), match="Writing all checkpoints takes"):
        ground.run(model="llama3-1t", scale=Fraction(1), writes=1000)
    assert ground.stored() == set()
    assert not ground.results.exists()


def test_reads_of_another_invocation_pair_with_its_writes(ground: Ground) -> None:
    first = ground.run(writes=2, reads=0)
    assert first.read is None
    assert first.gap_s is None
    second = ground.run(writes=0, reads=2)
    assert second.write is None
    assert second.is_right
    assert second.seed == first.seed
    assert second.earlier is not None
    assert second.earlier["run_folder"] == first.results_dir
    assert second.gap_s is not None
    assert second.gap_s >= 0
    assert second.document()["read"]["verified_bytes"] == 2 * first.total_bytes


def test_reads_of_other_checkpoints_than_lie_there_are_refused_with_every_difference(ground: Ground) -> None:
    ground.run(writes=1, reads=0)
    with pytest.raises(UsageError, match=r"scale 1/100000, not 1/50000; total_bytes"):
        ground.run(writes=0, reads=1, scale=Fraction(1, 50_000))
    with pytest.raises(UsageError, match="not 12"):
        ground.run(writes=0, reads=1, seed=12)
    with pytest.raises(UsageError, match="only 1 will exist"):
        ground.run(writes=0, reads=2)


def test_reads_without_any_checkpoints_say_how_to_get_some(ground: Ground) -> None:
    with pytest.raises(UsageError, match="Write some first"):
        ground.run(writes=0, reads=1)


def test_a_new_run_replaces_old_checkpoints_and_touches_nothing_else(ground: Ground) -> None:
    storage = ground.reopen()
    write_object(storage, "precious", [b"data"])
    first = ground.run(writes=3, reads=0)
    second = ground.run(writes=1, reads=1)
    assert second.seed != first.seed
    folders = {key.partition("/")[0] for key in ground.stored()}
    assert folders == {"global_epoch1_step1", KEY, "precious"}
    assert "Replacing 3 checkpoints" in ground.said[0]


def test_checkpoints_are_removed_at_the_end_if_asked(ground: Ground, tmp_path: Path) -> None:
    assert ground.run(removes=True).is_right
    assert ground.stored() == set()
    assert list((tmp_path / "ckpt").iterdir()) == []


class Interrupted(WrappedStorage):
    """Ctrl-C comes when the `at`-th object is begun."""

    def __init__(self, inside: Storage, at: str) -> None:
        super().__init__(inside)
        self.at = at

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        if self.at and self.at in key:
            raise KeyboardInterrupt
        return self.inside.create(key, size_bytes)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    storage = Interrupted(MemoryStorage(), "step2/zero_pp_rank_0_mp_rank_0_optim")
    ground = Ground(lambda: storage, tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt):
        ground.run(writes=3, reads=3)
    assert read_record(only_run(ground)).outcome is RunOutcome.INTERRUPTED
    assert "--resume to continue" in ground.said[-1]
    assert {key.partition("/")[0] for key in ground.stored()} == {"global_epoch1_step1", KEY}
    storage.at = ""
    result = ground.run(writes=3, reads=3, resumes=True)
    done = [(each.round.direction, each.round.step) for each in result.rounds]
    assert done == [("write", 2), ("write", 3), ("read", 1), ("read", 2), ("read", 3)]
    assert result.is_right
    assert result.earlier is not None
    assert result.earlier["kept_steps"] == (1,)


def test_wrong_bytes_are_found_placed_and_make_the_run_wrong(ground: Ground, tmp_path: Path) -> None:
    ground.run(writes=2, reads=0)
    path = tmp_path / "ckpt" / "global_epoch1_step2" / "zero_pp_rank_0_mp_rank_0_model_states.pt"
    content = bytearray(path.read_bytes())
    content[70_000] ^= 1
    path.write_bytes(content)
    result = ground.run(writes=0, reads=2)
    assert not result.is_right
    read = result.document()["read"]
    assert read["wrong_chunks"] == 1
    assert read["verified_bytes"] < read["bytes"]
    assert [each.phase.wrong_bytes for each in result.rounds] == [0, 1]
    (place,) = result.rounds[1].wrong
    assert (place.key, place.offset) == (f"global_epoch1_step2/{path.name}", 70_000)


def test_a_failure_of_one_rank_fails_all_and_cleans_up_after_all(tmp_path: Path) -> None:
    memory = MemoryStorage()

    def program(comm: Comm) -> str:
        storage: Storage = FailAtCall(memory, "finish", 2) if comm.rank == 1 else memory
        ground = Ground(lambda: storage, tmp_path / "runs")
        with pytest.raises(RankFailed) as failed:
            ground.run(comm=comm, writes=2, reads=0)
        return str(failed.value)

    said = on_ranks(3, program)
    assert len(set(said)) == 1
    assert said[0].startswith("Rank 1 on thread-1 failed")
    assert list(memory.list()) == []
    assert read_record(run_folders(tmp_path / "runs")[0]).outcome is RunOutcome.FAILED


def test_ranks_write_their_own_files_and_figures_are_of_all(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"

    def program(comm: Comm) -> CheckpointResult:
        ground = Ground(partial(open_storage, str(place), {}, rank=comm.rank), tmp_path / "runs")
        return ground.run(comm=comm, writes=2, reads=2)

    results = on_ranks(4, program)
    result = results[0]
    assert all(each.document() == result.document() for each in results)
    assert result.ranks == 4
    assert result.is_right
    assert len(list((place / "global_epoch1_step2").iterdir())) == 8
    write = result.document()["write"]
    assert write["bytes"] == 2 * result.total_bytes
    assert [(each["rank"], each["stream"]) for each in write["streams"]] == [
        (rank, stream) for rank in range(4) for stream in range(2)
    ]
    events = read_events(Path(result.results_dir))
    assert len(events) == 4
    for kind in (SpanKind.SAVE, SpanKind.LOAD):
        spans = [span for rank in events for span in rank.spans_of(kind)]
        assert sum(span.size_bytes for span in spans) == 2 * result.total_bytes


def test_with_a_recovery_shift_ranks_read_what_another_host_wrote(tmp_path: Path) -> None:
    memory = MemoryStorage()
    opened: list[tuple[int, str]] = []

    class Noting(WrappedStorage):
        def __init__(self, inside: Storage, rank: int) -> None:
            super().__init__(inside)
            self.rank = rank

        def open(self, key: str) -> Any:
            if key != KEY:
                opened.append((self.rank, key))
            return self.inside.open(key)

    def program(comm: Comm) -> CheckpointResult:
        ground = Ground(lambda: Noting(memory, comm.rank), tmp_path / "runs")
        return ground.run(comm=comm, writes=1, reads=1, settings=("checkpoint.recovery_rank_shift=true",))

    results = on_ranks(4, program, hosts=["a", "a", "b", "b"])
    assert results[0].shift == 2
    assert results[0].is_right
    assert {(rank, int(key.split("rank_")[1][0])) for rank, key in opened} == {
        (0, 2), (1, 3), (2, 0), (3, 1),
    }  # fmt: skip


def test_ranks_without_files_take_part_all_the_same(tmp_path: Path) -> None:
    memory = MemoryStorage()

    def program(comm: Comm) -> CheckpointResult:
        ground = Ground(lambda: memory, tmp_path / "runs")
        return ground.run(comm=comm, model="unet3d_h100", scale=Fraction(1, 1000), writes=1, reads=1)

    result = on_ranks(3, program)[0]
    assert result.is_right
    assert result.document()["write"]["bytes"] == 499153
    assert exists(memory, "global_epoch1_step1/model_states-0.pt")


class _Phases(Progress):
    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []
        self.moved: list[float] = []

    def begin(self, phase: str, total: float) -> None:
        self.seen.append((phase, total))
        self.moved.append(0)

    def advance(self, amount: float) -> None:
        self.moved[-1] += amount


def test_progress_is_told_round_by_round_and_comes_to_its_end(ground: Ground) -> None:
    phases = _Phases()
    result = ground.run(writes=2, reads=1, progress=phases)
    total = result.total_bytes
    assert phases.seen == [
        ("writing checkpoint 1 of 2, all ranks", total),
        ("writing checkpoint 2 of 2, all ranks", total),
        ("reading checkpoint 1 of 1, all ranks", total),
    ]
    assert phases.moved == [total] * 3


def test_a_run_of_nothing_is_refused(ground: Ground) -> None:
    with pytest.raises(UsageError, match="--writes or --reads"):
        ground.run(writes=0, reads=0)


@pytest.fixture
def damaged_marker(ground: Ground) -> Ground:
    write_object(ground.reopen(), KEY, [b'{"format": 1, "sed": 3}'])
    return ground


def test_a_marker_of_somebody_else_is_not_overwritten(damaged_marker: Ground) -> None:
    with pytest.raises(RankFailed, match="not as Penstock writes it"):
        damaged_marker.run()
    assert damaged_marker.stored() == {KEY}
