"""Every kind of value comes back as it was, on 1 and 2 ranks, or is refused before anything is written."""

from __future__ import annotations

import enum
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.saved_values import as_text, data_values, refused_values, trusted_values
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.masked import masked_tensor

import penstock.checkpoint as pc
from penstock.errors import DataDamaged, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def places(values: dict[str, Any]) -> dict[str, Any]:
    """Where such values are loaded to: tensors into tensors, anything else into whatever is there."""
    return {name: _place(value) for name, value in values.items()}


def _place(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _place(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor) and not value.is_quantized:
        return torch.zeros_like(value)
    return None


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, bool]:
    return {name: as_text(found[name]) == as_text(value) for name, value in expected.items()}


def _word(is_same: bool) -> str:  # noqa: FBT001 - what it says
    return "same" if is_same else "DIFFERS"


def round_trip(rank: int, path: Path) -> dict[str, bool]:
    """By value, whether it comes back; each rank has another number besides, so that objects differ."""
    values = {**data_values(), "own": (rank, frozenset({rank}))}
    pc.save(values, path)
    found = places(values)
    pc.load(found, path)
    return compare(found, values)


def test_every_value_comes_back_as_it_was_on_one_and_two_ranks(tmp_path: Path) -> None:
    alone = round_trip(0, tmp_path / "alone")
    first, second = on_gloo_ranks(2, round_trip, tmp_path / "two")
    rows = [(name, _word(alone[name]), _word(first[name] and second[name])) for name in alone]
    rows += [(name, "with trust", "with trust") for name in trusted_values()]
    rows += [(name, "refused", "refused") for name in refused_values()]
    table = "".join(f"{name:24}{one:12}{two}\n" for name, one, two in [("value", "1 rank", "2 ranks"), *rows])
    sys.stdout.write(f"\n{table}")
    assert all(alone.values())
    assert all(first.values())
    assert all(second.values())


def round_trip_with_another_default_device(rank: int, path: Path) -> dict[str, bool]:
    values = {**data_values(), "own": (rank, frozenset({rank}))}
    found = places(values)
    with torch.device("meta"):
        pc.save(values, path)
        pc.load(found, path)
    return compare(found, values)


def test_default_device_of_the_program_does_not_matter(tmp_path: Path) -> None:
    assert all(round_trip_with_another_default_device(0, tmp_path / "alone").values())
    for of_rank in on_gloo_ranks(2, round_trip_with_another_default_device, tmp_path / "two"):
        assert all(of_rank.values())


def test_stock_torch_loads_every_value_that_is_saved_here(tmp_path: Path) -> None:
    values = data_values()
    pc.save(values, tmp_path / "saved")
    found = places(values)
    stock_load(found, checkpoint_id=tmp_path / "saved")
    assert all(compare(found, values).values())


@pytest.mark.parametrize("planner", [None, pc.LoadPlanner], ids=["stock", "ours"])
def test_values_that_stock_torch_has_saved_come_back(tmp_path: Path, planner: Any) -> None:
    values = data_values()
    stock_save(values, checkpoint_id=tmp_path / "saved")
    found = places(values)
    pc.load(found, tmp_path / "saved")
    assert all(compare(found, values).values())
    # As a tensor, a quantized one can only be read by torch's own calls if it is asked for as an object.
    found = {name: value for name, value in places(values).items() if "int8" not in name}
    reader = pc.Reader(tmp_path / "saved")
    stock_load(found, storage_reader=reader, planner=planner and planner())
    assert all(compare(found, {name: values[name] for name in found}).values())


def test_save_says_what_will_need_trust(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = trusted_values()
    with caplog.at_level(logging.WARNING), pc.Manager(tmp_path) as manager:
        manager.save(1, values)
        manager.save(2, values)
    for name in values:
        assert caplog.text.count(f"{name!r} cannot be loaded without trust=True: ") == 1
    for name in values:
        with pytest.raises(UsageError, match="is more than data"):
            pc.load({name: None}, tmp_path / "step-1")
        pc.load({name: None}, tmp_path / "step-1", trust=True)


class Phase(enum.Enum):
    UNKNOWN = float("nan")
    TRAINING = 1


def values_refused_by_loads() -> dict[str, Any]:
    return {
        "titles": np.zeros(1, dtype=[(("a title", "a"), "i4")]),
        "nan": (Phase.UNKNOWN,),
    }


@pytest.mark.parametrize("which", list(values_refused_by_loads()))
def test_an_intact_step_that_cannot_be_rebuilt_is_named_and_not_skipped(
    which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pc.Manager(tmp_path) as manager:
        manager.save(1, {"meta": None})
        with caplog.at_level(logging.WARNING):
            manager.save(2, {"meta": values_refused_by_loads()[which]})
        assert "'meta' cannot be loaded without trust=True: " in caplog.text
        with pytest.raises(
            UsageError, match=r"The object meta cannot be read: .*bytes are as they were saved"
        ):
            manager.restore({"meta": None})


@pytest.mark.parametrize("choice", ["trusted", "plain"])
def test_a_step_with_a_member_that_an_enum_has_lost_is_named_and_not_skipped(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pc.Manager(tmp_path) as manager:
        manager.save(1, {"phase": None})
        manager.save(2, {"phase": Phase.TRAINING})
        monkeypatch.setattr(f"{__name__}.Phase", enum.Enum("Phase", {"WARMUP": 2}, module=__name__))
        with pytest.raises(UsageError, match=r"The object phase cannot be .*1 is not a valid Phase"):
            manager.restore({"phase": None}, trust=choice == "trusted")


def test_what_is_nested_too_deeply_is_refused_by_the_save(tmp_path: Path) -> None:
    deep: tuple[Any, ...] = ()
    for _ in range(600):
        deep = (deep,)
    with pytest.raises(UsageError, match=r"'q' cannot be saved.*: it is nested too deeply") as caught:
        pc.save({"q": deep}, tmp_path / "saved")
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrap", "levels"),
    [
        (lambda inner: (inner,), 1),
        (lambda inner: frozenset([inner]), 1),
        (lambda inner: ({"key": inner},), 2),
        (lambda inner: [(inner,)], 2),
    ],
)
def test_whatever_is_saved_is_flat_enough_for_a_load(
    tmp_path: Path, wrap: Callable[[Any], Any], levels: int
) -> None:
    value: Any = 1
    for _ in range(200 // levels):
        value = wrap(value)
    pc.save({"q": {"x": value}}, tmp_path / "saved")
    loaded: dict[str, Any] = {"q": {}}
    pc.load(loaded, tmp_path / "saved")
    assert loaded["q"]["x"] == value
    with pytest.raises(UsageError, match=r"'q\.x' cannot be saved: it is nested more than 200 levels deep"):
        pc.save({"q": {"x": wrap(value)}}, tmp_path / "other")
    assert list(tmp_path.glob("*")) == [tmp_path / "saved"]


def test_tensors_that_need_trust_inside_an_object_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with caplog.at_level(logging.WARNING):
        pc.save({"q": (jagged,)}, tmp_path / "saved")
    assert "it is made of a tensor of class torch.nested._internal.nested_tensor.NestedTensor" in caplog.text


def test_data_needs_no_trust_and_no_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pc.save(data_values(), tmp_path / "saved")
    assert not caplog.records


@pytest.mark.parametrize("name", list(refused_values()))
def test_value_that_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError):
        pc.save({"step": 1, name: refused_values()[name]}, tmp_path / "run" / "saved")
    assert not list((tmp_path / "run").iterdir())


class Scaled(torch.Tensor):
    """A tensor that may have something beside its elements."""

    scale: int


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_what_a_tensor_has_beside_its_elements_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaled = torch.ones(3).as_subclass(Scaled)
    scaled.scale = 2
    with pc.Manager(tmp_path) as manager:
        manager.save(1, {"w": scaled, "v": torch.ones(2).as_subclass(Scaled)})
        manager.save(2, {"w": scaled, "v": torch.ones(2).as_subclass(Scaled)})
    assert caplog.messages == [
        "Attributes of tensors are not saved: 'w' (Scaled: scale). Put them into the state"
    ]
    masked = masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    with pytest.raises(UsageError, match=r"'m' is a MaskedTensor, which has no memory of its own"):
        pc.save({"m": masked}, tmp_path / "masked")


@pytest.mark.parametrize("state", [[1], torch.nn.Linear(1, 1), "step"], ids=["list", "module", "text"])
def test_state_that_is_no_dict_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(UsageError, match="not a dict"):
        pc.save(state, tmp_path / "saved")
    pc.save({"step": 1}, tmp_path / "saved")
    with pytest.raises(UsageError, match="not a dict"):
        pc.load(state, tmp_path / "saved")


def test_name_that_is_no_text_is_refused_by_the_writer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="half of a character"):
        stock_save({"\ud800": torch.ones(2)}, storage_writer=pc.Writer(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_object_of_an_absurd_length_is_damage_and_asks_for_no_memory(tmp_path: Path) -> None:
    stock_save({"note": frozenset({1})}, checkpoint_id=tmp_path / "saved")
    path = tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = 1 << 62
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataDamaged, match="'note' should end at byte 4611686018427387904 of a file that has"):
        pc.load({"note": None}, tmp_path / "saved")
    with pytest.raises(CheckpointException, match="'note' should end at byte 4611686018427387904"):
        stock_load({"note": None}, storage_reader=pc.Reader(tmp_path / "saved"))
