"""Stock torch loads bit for bit what the engine saves, and refused saves leave nothing behind."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import penstock.checkpoint as pc
from penstock.checkpoint.api import save
from penstock.checkpoint.formats.description import read_manifest
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.torch_dcp import SavePlanner, Writer
from penstock.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "model": {
            "weight": torch.randn(200, 300, generator=generator),
            "transposed": torch.randn(64, 128, generator=generator).t(),
            "half": torch.randn(33, 5, generator=generator).bfloat16(),
            "tiny": torch.randn(16, generator=generator).to(torch.float8_e4m3fn),
            "counts": torch.arange(7),
            "mask": torch.tensor([True, False, True]),
            "complex": torch.randn(5, generator=generator).to(torch.complex64).conj(),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
        },
        "layers": [torch.ones(3), {"name": "norm", "eps": 1e-5}],
        "step": 7,
        "rng": torch.get_rng_state(),
        "words": ["a", "b"],
    }


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=torch.uint8).to(value.dtype)
    if isinstance(value, dict):
        return {key: _blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_blank(inner) for inner in value]
    return None


def _assert_same(found: Any, expected: Any, where: str = "state") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        plain = [each.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (found, expected)]
        assert plain[0].equal(plain[1]), where
    elif isinstance(expected, dict):
        for key, inner in expected.items():
            _assert_same(found[key], inner, f"{where}.{key}")
    elif isinstance(expected, list):
        for number, inner in enumerate(expected):
            _assert_same(found[number], inner, f"{where}[{number}]")
    else:
        assert found == expected, where


def _stock_load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = _blank(_state())
    stock_load(found, checkpoint_id=path)
    return found


def _ours(state: dict[str, Any], path: Path) -> None:
    save(state, path)


def _writer_and_planner(state: dict[str, Any], path: Path) -> None:
    stock_save(state, storage_writer=Writer(path), planner=SavePlanner())


def _writer_alone(state: dict[str, Any], path: Path) -> None:
    stock_save(state, storage_writer=Writer(path, writers=3))


def _planner_alone(state: dict[str, Any], path: Path) -> None:
    stock_save(state, storage_writer=FileSystemWriter(path), planner=SavePlanner())


def _writer_without_fsync(state: dict[str, Any], path: Path) -> None:
    stock_save(state, storage_writer=Writer(path, fsync=False, separation_hint="model"))


def _compressed(state: dict[str, Any], path: Path) -> None:
    save(state, path, transforms=["stream.zstd/1"])


def _writer_compressed(state: dict[str, Any], path: Path) -> None:
    stock_save(state, storage_writer=Writer(path, transforms=["stream.zstd/1"]), planner=SavePlanner())


WAYS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "save": _ours,
    "Writer and SavePlanner": _writer_and_planner,
    "Writer alone": _writer_alone,
    "SavePlanner alone": _planner_alone,
    "Writer without fsync": _writer_without_fsync,
    "save, compressed": _compressed,
    "Writer, compressed": _writer_compressed,
}


@pytest.mark.parametrize("way", WAYS)
def test_stock_torch_loads_what_was_saved_bit_for_bit(tmp_path: Path, way: str) -> None:
    WAYS[way](_state(), tmp_path / "step-7")
    _assert_same(_stock_load(tmp_path / "step-7"), _state())


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_loads_what_was_saved_bit_for_bit(tmp_path: Path, way: str) -> None:
    WAYS[way](_state(), tmp_path / "step-7")
    found = _blank(_state())
    pc.load(found, tmp_path / "step-7")
    _assert_same(found, _state())


def test_compression_makes_files_smaller(tmp_path: Path) -> None:
    save({"zeros": torch.zeros(1 << 18)}, tmp_path / "step", transforms=["stream.zstd/1"])
    assert (tmp_path / "step/__0_0.distcp").stat().st_size < 16 * 1024


def test_an_unknown_transform_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'stream\.lzma/1' is not supported"):
        save({}, tmp_path / "step", transforms=["stream.lzma/1"])
    with pytest.raises(UsageError, match=r"'stream\.lzma/1' is not supported"):
        Writer(tmp_path / "step", transforms=["stream.lzma/1"])


def test_a_writer_can_save_repeatedly_to_other_paths(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "step-1", staging_bytes=1 << 20)
    stock_save(_state(), storage_writer=writer)
    stock_save(_state(), storage_writer=writer, checkpoint_id=tmp_path / "step-2")
    for name in ("step-1", "step-2"):
        _assert_same(_stock_load(tmp_path / name), _state())


def test_a_process_without_others_saves_without_collectives(tmp_path: Path) -> None:
    stock_save(_state(), storage_writer=Writer(tmp_path / "step"), no_dist=True, use_collectives=False)
    _assert_same(_stock_load(tmp_path / "step"), _state())


def _save_without_collectives(rank: int, folder: Path) -> str:
    with pytest.raises(UsageError, match="use_collectives") as caught:
        Writer(folder / "step").set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    return str(caught.value)


def test_ranks_that_do_not_communicate_save_nothing_together(tmp_path: Path) -> None:
    assert len(on_gloo_ranks(2, _save_without_collectives, tmp_path)) == 2
    assert not (tmp_path / "step").exists()


def test_a_writer_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="writers=0"):
        Writer(tmp_path / "step", writers=0)
    with pytest.raises(UsageError, match="writers=0"):
        save(_state(), tmp_path / "step", writers=0)
    with pytest.raises(BaseException, match="fsync=False is for file systems"):
        stock_save({}, storage_writer=Writer("s3://bucket/run/step", fsync=False))


def test_stock_conversion_rebuilds_the_nested_state(tmp_path: Path) -> None:
    save(_state(), tmp_path / "step-7")
    dcp_to_torch_save(tmp_path / "step-7", tmp_path / "whole.pt")
    _assert_same(torch.load(tmp_path / "whole.pt", weights_only=True), _state())


def test_names_with_the_separation_hint_are_in_separate_files(tmp_path: Path) -> None:
    save(_state(), tmp_path / "step", separation_hint="model", writers=2)
    files = {path.name for path in (tmp_path / "step").iterdir()}
    assert files == {
        *("model__0_0.distcp", "model__0_1.distcp", "__0_0.distcp", "__0_1.distcp"),
        *(".metadata", "penstock.json"),
    }
    _assert_same(_stock_load(tmp_path / "step"), _state())


def test_saving_again_replaces_the_whole_checkpoint(tmp_path: Path) -> None:
    older = _state()
    older["model"]["weight"] = torch.zeros(999)
    save(older, tmp_path / "step")
    save(_state(), tmp_path / "step")
    _assert_same(_stock_load(tmp_path / "step"), _state())
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_part_may_be_saved_and_converted(tmp_path: Path) -> None:
    save(_state(), tmp_path / "model", only="model.*", dtype=torch.bfloat16)
    found = {
        "model": {"weight": torch.zeros(200, 300).bfloat16(), "counts": torch.zeros(7, dtype=torch.int64)}
    }
    stock_load(found, checkpoint_id=tmp_path / "model")
    expected = _state()["model"]
    assert found["model"]["weight"].equal(expected["weight"].bfloat16())
    assert found["model"]["counts"].equal(expected["counts"])
    manifest = read_manifest((tmp_path / "model/penstock.json").read_bytes(), "here")
    assert all(name.startswith("model.") for name in manifest.names)


def test_choosing_nothing_is_an_error_that_shows_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"only='optim\.\*'.*'model\.weight'"):
        save(_state(), tmp_path / "step", only="optim.*")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_state_is_a_valid_checkpoint(tmp_path: Path) -> None:
    save({}, tmp_path / "step")
    assert {path.name for path in (tmp_path / "step").iterdir()} == {".metadata", "penstock.json"}


def test_unpicklable_objects_are_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        save({"handler": lambda: None}, tmp_path / "step")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_torchs_save_leaves_nothing_visible(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "step")

    class Failing(SavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise OSError("gone")

    with pytest.raises(BaseException, match="gone"):
        stock_save(_state(), storage_writer=writer, planner=Failing())
    assert not (tmp_path / "step").exists()
    stock_save(_state(), storage_writer=writer, planner=SavePlanner())
    _assert_same(_stock_load(tmp_path / "step"), _state())
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_overwriting_tensors_after_staging_does_not_change_the_save(tmp_path: Path) -> None:
    state = {"weight": torch.randn(1 << 20), "strided": torch.randn(512, 700).t()}
    with Manager(tmp_path, staging_bytes=64 << 20) as manager:
        expected = []
        handles = []
        for step in range(3):
            expected.append({name: value.clone() for name, value in state.items()})
            handles.append(manager.save_async(step, state))
            for value in state.values():
                value.uniform_()
        for handle in handles:
            handle.result(timeout=120)
        for step in range(3):
            found = {"weight": torch.zeros(1 << 20), "strided": torch.zeros(700, 512)}
            stock_load(found, checkpoint_id=tmp_path / f"step-{step}")
            _assert_same(found, expected[step])


def test_a_background_save_larger_than_its_memory_is_consistent(tmp_path: Path) -> None:
    state = {f"weight{number}": torch.randn(1 << 20) for number in range(6)}
    before = {name: value.clone() for name, value in state.items()}
    with Manager(tmp_path, staging_bytes=4 << 20) as manager:
        handle = manager.save_async(1, state)
        for value in state.values():
            value.zero_()
        report = handle.result(timeout=120)
        assert report.ranks[0].memory_bytes <= 4 << 20
    found = {name: torch.zeros(1 << 20) for name in state}
    stock_load(found, checkpoint_id=tmp_path / "step-1")
    _assert_same(found, before)


def test_large_payloads_begin_at_multiples_of_the_page_size(tmp_path: Path) -> None:
    save({**_state(), "large": torch.ones(1 << 14)}, tmp_path / "step")
    manifest = read_manifest((tmp_path / "step/penstock.json").read_bytes(), "here")
    num_large = 0
    for file in manifest.files:
        assert (tmp_path / "step" / file.name).stat().st_size == file.size_bytes
        large = file.item_bytes >= 1 << 16
        num_large += int(large.sum())
        assert (file.payload_offset[large] % 4096 == 0).all()
    assert num_large


def test_thousands_of_tiny_tensors_take_little_more_room_than_in_torchs_own_checkpoint(
    tmp_path: Path,
) -> None:
    tiny = {f"layer{number}.scale": torch.zeros(4) for number in range(1000)}
    save(tiny, tmp_path / "ours")
    stock_save(tiny, checkpoint_id=tmp_path / "stock")
    ours, stock = (
        sum(path.stat().st_size for path in (tmp_path / name).iterdir()) for name in ("ours", "stock")
    )
    assert ours <= 1.1 * stock


def test_saving_warns_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(_state(), tmp_path / "step")
