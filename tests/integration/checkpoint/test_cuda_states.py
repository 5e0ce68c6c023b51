"""States on a GPU, if there is one: staged through pinned memory beside the trainer, restored in place."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import penstock.checkpoint as pc
from penstock.checkpoint.adapters.async_writer import AsyncWriter
from penstock.checkpoint.torch_dcp import LoadPlanner, Reader, SavePlanner, Writer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


def state_on_gpu(seed: int) -> dict[str, Any]:
    """Contiguous, strided, conjugated, 0-d and empty tensors of many dtypes, and values of other kinds."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    state: dict[str, Any] = {
        str(dtype): torch.randn(300, 70, generator=generator, device="cuda").to(dtype) for dtype in DTYPES
    }
    state["turned"] = torch.randn(500, 33, generator=generator, device="cuda").t()
    state["conjugated"] = torch.randn(9, 9, generator=generator, device="cuda", dtype=torch.cfloat).conj()
    state["scalar"] = torch.tensor(float(seed), device="cuda")
    state["empty"] = torch.empty(0, 3, device="cuda")
    state["large"] = torch.randn(3000, 2048, generator=generator, device="cuda")
    state["here"] = torch.full((100,), float(seed))
    state["step"] = seed
    return state


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(
        torch.equal(bits(found[name]), bits(value))
        if isinstance(value, torch.Tensor)
        else found[name] == value
        for name, value in expected.items()
    )


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


@pytest.mark.parametrize("staging_bytes", [8 << 20, 512 << 20])
def test_values_on_a_gpu_come_back_and_are_those_of_the_moment_of_the_save(
    tmp_path: Path, staging_bytes: int
) -> None:
    state = state_on_gpu(1)
    expected = copied(state)
    with pc.Manager(tmp_path, staging_bytes=staging_bytes) as manager:
        for step in (1, 2):
            # Queued and not done when the save begins: it has to wait for it, on the device.
            state["large"].fill_(0.0)
            for _ in range(50):
                state["large"].add_(1.0)
            expected["large"] = torch.full_like(state["large"], 50.0)
            handle = manager.save_async(step, state)
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name != "conjugated":
                    value.zero_()
            handle.result()
            found = state_on_gpu(7)
            assert manager.restore(found) == step
            assert same(found, expected)
            for name, value in expected.items():
                if isinstance(value, torch.Tensor) and name != "conjugated":
                    state[name].copy_(value)


def test_work_of_another_stream_is_waited_for(tmp_path: Path) -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch leaves it untyped
    tensor = torch.zeros(64 << 20, device="cuda")
    with torch.cuda.stream(side), pc.Manager(tmp_path) as manager:
        for _ in range(100):
            tensor.add_(1.0)
        handle = manager.save_async(1, {"w": tensor}, staging="background")
        handle.wait_staged()
        tensor.zero_()
        handle.result()
        found = {"w": torch.zeros_like(tensor)}
        manager.restore(found)
    torch.cuda.synchronize()
    assert found["w"].eq(100.0).all()


def test_stock_torch_and_ours_read_each_others_states_of_a_gpu(tmp_path: Path) -> None:
    state = {name: value for name, value in state_on_gpu(3).items() if name != "conjugated"}
    stock_save(state, storage_writer=Writer(tmp_path / "ours"), planner=SavePlanner())
    stock_save(state, checkpoint_id=tmp_path / "stock")
    for name in ("ours", "stock"):
        found = {key: value for key, value in state_on_gpu(4).items() if key != "conjugated"}
        stock_load(found, storage_reader=Reader(tmp_path / name), planner=LoadPlanner())
        assert same(found, state)
        found = {key: value for key, value in state_on_gpu(5).items() if key != "conjugated"}
        pc.load(found, tmp_path / name)
        assert same(found, state)
    found = {key: value for key, value in state_on_gpu(6).items() if key != "conjugated"}
    stock_load(found, checkpoint_id=tmp_path / "ours")
    assert same(found, state)


def test_what_is_pinned_stays_within_the_staging_memory(tmp_path: Path) -> None:
    state = {"w": torch.randn(64 << 20, device="cuda")}
    with pc.Manager(tmp_path, staging_bytes=32 << 20) as manager:
        report = manager.save(1, state)
        assert report.ranks[0].memory_bytes <= 32 << 20


@pytest.mark.slow
def test_the_stall_of_a_save_is_that_of_one_pinned_copy(tmp_path: Path) -> None:
    size_bytes = 4 << 30
    state = {f"w{number}": torch.randn(8192, 4096, device="cuda") for number in range(size_bytes >> 27)}
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    stalls, copies = [], []
    with pc.Manager(tmp_path, keep=1, staging_bytes=size_bytes + (256 << 20)) as manager:
        for step in range(6):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            handle = manager.save_async(step, state)
            stalls.append(time.perf_counter() - began_s)
            handle.result()
            began_s = time.perf_counter()
            start = 0
            for tensor in state.values():
                flat = tensor.reshape(-1).view(torch.uint8)
                pinned[start : start + flat.numel()].copy_(flat, non_blocking=True)
                start += flat.numel()
            torch.cuda.synchronize()
            copies.append(time.perf_counter() - began_s)
    # The first save makes and pins its memory.
    assert statistics.median(stalls[1:]) <= 1.2 * statistics.median(copies[1:])


def test_the_writer_of_other_frameworks_takes_tensors_of_a_gpu(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.randn(3000, 100, device="cuda"), "step": 3}
    planner = SavePlanner()
    writer = AsyncWriter(tmp_path)
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    writer.prepare_write_data(planner.finish_plan(plan), planner)
    function, preload, (rank, _, report) = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    work, before = preload(), state["w"].clone()
    state["w"].zero_()
    function(rank, work, report)
    writer.finish(metadata, [writer.retrieve_write_results()])
    found: dict[str, Any] = {"w": torch.zeros(3000, 100, device="cuda"), "step": 0}
    pc.load(found, tmp_path)
    assert found["step"] == 3
    assert found["w"].equal(before)
