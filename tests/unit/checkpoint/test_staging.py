"""One rank's share in flight: values are those at staging time, and memory is returned once."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock.checkpoint.engine import RankSaveStats, SaveCancelled
from penstock.checkpoint.file_layout import FileItem, FileLayout, lay_out_file, payload_of_tensor
from penstock.checkpoint.plan.save_plan import Bucket
from penstock.checkpoint.saver import (
    CopyOrder,
    SaveShare,
    StagedFiles,
    choose_pipeline_settings,
)
from penstock.checkpoint.state.regions import Regions, TensorFacts
from penstock.errors import StorageError, UsageError, WaitTimeout
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import read_object
from penstock.testing.faults import FailAtCall
from penstock.transfer.buffers import StagingMemory

MIB = 1 << 20


def _share(*tensors: torch.Tensor) -> SaveShare:
    """Each tensor in a file of its own."""
    facts = tuple(
        TensorFacts(f"t{number}", "float32", tuple(one.shape), 4) for number, one in enumerate(tensors)
    )
    regions = [Regions.from_rows([(number, (0,), one.shape)]) for number, one in enumerate(tensors)]
    buckets = [
        Bucket(file=f"__0_{number}.distcp", objects=(), regions=each) for number, each in enumerate(regions)
    ]
    layouts = tuple(lay_out_file(bucket, facts) for bucket in buckets)
    return SaveShare(
        layouts=layouts,
        payloads={
            layout.name: [payload_of_tensor(one)] for layout, one in zip(layouts, tensors, strict=True)
        },
        stats=RankSaveStats(rank=0, payload_bytes=sum(one.nbytes for one in tensors)),
    )


def _staged(share: SaveShare, memory: StagingMemory, *, copies: CopyOrder = "at once") -> StagedFiles:
    settings = choose_pipeline_settings(share.layouts, 2, memory.budget_bytes)
    return StagedFiles(share, memory, settings, copies=copies, timeout_s=60)


def _payload(storage: MemoryStorage, share: SaveShare, number: int) -> torch.Tensor:
    layout = share.layouts[number]
    item = layout.items[0]
    content = read_object(storage, f"step/{layout.name}")
    return torch.frombuffer(content[item.payload_offset : item.payload_end], dtype=torch.float32)


@pytest.mark.parametrize("copies", ["at once", "before all else"])
def test_tensors_may_change_once_they_are_staged(copies: CopyOrder) -> None:
    tensors = [torch.randn(MIB // 4), torch.randn(MIB // 2)]
    before = [one.clone() for one in tensors]
    storage, share = MemoryStorage(), _share(*tensors)
    staged = _staged(share, StagingMemory(16 * MIB), copies=copies)
    staged.wait_staged(60)
    for one in tensors:
        one.fill_(7)
    report = staged.write_to(storage, lambda name: f"step/{name}")
    assert [_payload(storage, share, number).equal(one) for number, one in enumerate(before)] == [True, True]
    assert report.stats.payload_bytes == 3 * MIB
    assert report.stats.file_bytes == sum(file.size_bytes for file in report.files)
    assert report.stats.memory_bytes <= 16 * MIB


def test_copies_with_the_writes_do_not_begin_before_them() -> None:
    tensor = torch.zeros(MIB // 4)
    storage, share = MemoryStorage(), _share(tensor)
    staged = _staged(share, StagingMemory(16 * MIB), copies="with the writes")
    with pytest.raises(WaitTimeout):
        staged.wait_staged(0.01)
    tensor.fill_(7)
    staged.write_to(storage, lambda name: f"step/{name}")
    assert _payload(storage, share, 0).equal(tensor)
    staged.wait_staged(60)


def test_a_share_larger_than_the_memory_is_staged_once_the_rest_is_written() -> None:
    tensors = [torch.randn(2 * MIB) for _ in range(2)]
    before = [one.clone() for one in tensors]
    storage, share = MemoryStorage(), _share(*tensors)
    staged = _staged(share, StagingMemory(2 * MIB))
    with pytest.raises(WaitTimeout):
        staged.wait_staged(0.01)
    writer = threading.Thread(target=lambda: staged.write_to(storage, lambda name: f"step/{name}"))
    writer.start()
    staged.wait_staged(60)
    for one in tensors:
        one.fill_(7)
    writer.join(60)
    assert [_payload(storage, share, number).equal(one) for number, one in enumerate(before)] == [True, True]


def test_memory_is_returned_when_the_files_are_written() -> None:
    memory, share = StagingMemory(4 * MIB), _share(torch.randn(MIB // 2))
    for _ in range(3):
        _staged(share, memory).write_to(MemoryStorage(), str)
    assert memory._lent_bytes == 0
    assert len(memory._idle) == 1


@pytest.mark.parametrize("copies", ["at once", "with the writes"])
def test_a_cancelled_save_raises_in_waiting_threads_and_returns_its_memory(copies: CopyOrder) -> None:
    memory, share = StagingMemory(MIB), _share(torch.randn(2 * MIB))
    staged = _staged(share, memory, copies=copies)
    staged.cancel()
    staged.cancel()
    with pytest.raises(SaveCancelled):
        staged.wait_staged(60)
    with pytest.raises(SaveCancelled):
        staged.write_to(MemoryStorage(), str)
    assert memory._lent_bytes == 0


def test_cancelling_reaches_a_save_that_is_being_written() -> None:
    share = _share(torch.randn(4 * MIB))
    memory, started = StagingMemory(MIB), threading.Event()

    class Stuck(MemoryStorage):
        def create(self, key: str, size_bytes: int | None = None):  # type: ignore[no-untyped-def]  # noqa: ANN202
            started.set()
            assert cancelled.wait(60)
            return super().create(key, size_bytes)

    cancelled = threading.Event()
    staged = _staged(share, memory)
    seen: list[BaseException] = []

    def write() -> None:
        try:
            staged.write_to(Stuck(), str)
        except SaveCancelled as error:
            seen.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert started.wait(60)
    staged.cancel()
    cancelled.set()
    writer.join(60)
    assert len(seen) == 1
    assert memory._lent_bytes == 0


def test_a_failing_storage_fails_the_write_and_the_stage_alike() -> None:
    memory, share = StagingMemory(MIB), _share(torch.randn(2 * MIB))
    staged = _staged(share, memory)
    with pytest.raises(StorageError, match="Injected fault"):
        staged.write_to(FailAtCall(MemoryStorage(), "submit", 2), str)
    with pytest.raises(StorageError, match="Injected fault"):
        staged.wait_staged(60)
    assert memory._lent_bytes == 0


def test_a_rank_with_nothing_to_write_writes_no_file() -> None:
    storage = MemoryStorage()
    report = _staged(_share(), StagingMemory(MIB)).write_to(storage, str)
    assert report.files == ()
    assert list(storage.list()) == []


def test_memory_waits_for_earlier_saves_and_times_out() -> None:
    memory = StagingMemory(4 * MIB)
    first = memory.borrow(3 * MIB, 60)
    with pytest.raises(WaitTimeout, match="an earlier save to give back its staging memory"):
        memory.borrow(2 * MIB, 0.01)
    memory.give_back(first)
    assert memory.borrow(2 * MIB, 60) is first


def test_memory_never_exceeds_its_budget_even_if_sizes_grow() -> None:
    memory = StagingMemory(4 * MIB)
    memory.give_back(memory.borrow(MIB, 60))
    grown = memory.borrow(4 * MIB, 60)
    assert grown.size_bytes == 4 * MIB
    assert not memory._idle
    with pytest.raises(UsageError, match="do not fit into staging_bytes"):
        memory.borrow(5 * MIB, 60)


@pytest.mark.parametrize("sizes", [(), (1,), (10, 3 * MIB), (100 * MIB, 5, 40 * MIB)])
@pytest.mark.parametrize("budget", [64 * 1024, MIB, 256 * MIB])
def test_settings_never_exceed_the_budget_or_the_need(sizes: tuple[int, ...], budget: int) -> None:
    layouts = tuple(
        FileLayout(f"__0_{number}.distcp", (FileItem(0, b"", size, b""),))
        for number, size in enumerate(sizes)
    )
    settings = choose_pipeline_settings(layouts, 2, budget)
    assert settings.buffer_memory_bytes <= budget
    assert settings.chunk_bytes % 4096 == 0
    assert settings.buffer_memory_bytes <= sum(sizes) + 4 * settings.chunk_bytes
