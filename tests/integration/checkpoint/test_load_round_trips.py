"""Loading on one rank: every format into every kind of place, chosen parts, and what is refused."""

import io
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.testing._internal.two_tensor import TwoTensor

from penstock.checkpoint.api import load, save
from penstock.checkpoint.engine import LoadChoice, borrowed_comm
from penstock.checkpoint.formats.checkpoint_source import open_checkpoint, open_folder
from penstock.checkpoint.loader import CheckpointLoader
from penstock.checkpoint.torch_dcp import LoadPlanner, Reader
from penstock.errors import DataDamaged, ObjectNotFound, PenstockError, UsageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import write_object
from penstock.transfer.reader import ReadSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = dict[str, Any]


def state_of(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model": OrderedDict(
            weight=random(300, 50),
            half=random(17).bfloat16(),
            tiny=random(40, 3).to(torch.float8_e4m3fn),
            counts=torch.arange(9) * seed,
            mask=random(33) > 0,
            complex=random(5, 4).to(torch.complex64),
            scalar=torch.tensor(1.5 * seed),
            empty=torch.empty(0, 4),
        ),
        "optimizer": {0: {"moment": random(50, 6), "step": seed}},
        "layers": [random(3), {"name": f"norm{seed}"}],
        "note": f"seed {seed}",
        "betas": (0.9, 0.1 * seed),
    }


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (found, expected)]
        assert bits[0].equal(bits[1]), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, inner in expected.items():
            assert_same(found[key], inner, f"{where}.{key}")
    elif isinstance(expected, list):
        for number, inner in enumerate(expected):
            assert_same(found[number], inner, f"{where}[{number}]")
    else:
        assert found == expected, where


def stock(state: State, path: Path) -> None:
    stock_save(state, checkpoint_id=path)


SAVERS: dict[str, Callable[[State, Path], object]] = {"ours": save, "stock": stock, "torch.save": torch.save}


def through_load(state: State, path: Path) -> None:
    load(state, path)


def through_reader(state: State, path: Path) -> None:
    stock_load(state, storage_reader=Reader(path), planner=LoadPlanner())


LOADERS: dict[str, Callable[[State, Path], None]] = {"load": through_load, "dcp.load": through_reader}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("saver", SAVERS)
def test_every_format_loads_in_place(tmp_path: Path, saver: str, loader: str) -> None:
    SAVERS[saver](state_of(1), tmp_path / "saved")
    found = state_of(2)
    weight = found["model"]["weight"]
    LOADERS[loader](found, tmp_path / "saved")
    assert_same(found, state_of(1))
    assert found["model"]["weight"] is weight


def test_stock_planner_and_reader_work_with_our_counterparts(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "ours")
    stock(state_of(1), tmp_path / "stock")
    found = state_of(2)
    stock_load(found, storage_reader=FileSystemReader(tmp_path / "ours"), planner=LoadPlanner())
    assert_same(found, state_of(1))
    tensors = {"model": state_of(2)["model"], "note": ""}
    stock_load(tensors, storage_reader=Reader(tmp_path / "stock"))
    assert tensors["note"] == "seed 1"
    assert_same(tensors["model"], state_of(1)["model"])


def test_safetensors_load_in_place(tmp_path: Path) -> None:
    saved = {name: each for name, each in state_of(1)["model"].items() if name != "complex"}
    save_file(saved, tmp_path / "model.safetensors")
    found = {name: torch.zeros_like(each) for name, each in saved.items()}
    load(found, tmp_path / "model.safetensors")
    assert_same(found, saved)


def test_memory_of_any_stride_is_filled(tmp_path: Path) -> None:
    full = torch.arange(24.0).reshape(4, 6)
    save({"w": full, "v": full[:, 0].clone()}, tmp_path / "step")
    wide = torch.full((8, 6), -1.0)
    found = {"w": wide[::2], "v": torch.zeros(6, 4)[0].as_strided((4,), (1,))}
    load(found, tmp_path / "step")
    assert wide[::2].equal(full)
    assert wide[1::2].eq(-1).all()
    turned = torch.zeros(6, 4)
    load({"w": turned.t()}, tmp_path / "step")
    assert turned.equal(full.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.uint8])
def test_empty_tensors_and_single_elements_of_any_stride_come_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    state = {"of a row": torch.arange(1, 3).to(dtype)[None][:, 0], "steps": torch.arange(5, 8).to(dtype)[::3]}
    none = torch.ones(4, 3).to(dtype)[:0]
    save(state | {"column": none[:, 1], "turned": none.t(), "none": none[:, ::2]}, tmp_path / "step")
    found = {"column": torch.empty_strided((0,), (7,), dtype=dtype), "turned": none.t(), "none": none[:, :2]}
    load(found, tmp_path / "step")
    for each in state.values():
        each.zero_()
    load(state, tmp_path / "step")
    assert {name: each.tolist() for name, each in state.items()} == {"of a row": [1], "steps": [5]}


@given(st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_and_dtype_comes_back(tmp_path: Path, data: st.DataObject) -> None:
    dtypes = [
        torch.float64,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.uint8,
        torch.int16,
        torch.bool,
        torch.complex128,
    ]
    state, found = {}, {}
    for number in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
        dtype = data.draw(st.sampled_from(dtypes))
        bits = torch.randint(0, 2, [*shape, dtype.itemsize], dtype=torch.uint8)
        state[f"w{number}"] = bits.view(dtype).reshape(shape)
        found[f"w{number}"] = torch.zeros(shape, dtype=torch.uint8).to(dtype)
    save(state, tmp_path / "step")
    load(found, tmp_path / "step")
    assert_same(found, state)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(state_of(1), tmp_path / "step")
    return tmp_path / "step"


def test_chosen_parts_load_and_the_rest_is_listed(saved: Path) -> None:
    found = state_of(2)
    report = load(found, saved, only=["model.*", "note"], exclude="model.weight")
    expected = state_of(2)
    expected["model"].update({name: each for name, each in state_of(1)["model"].items() if name != "weight"})
    expected["note"] = "seed 1"
    assert_same(found, expected)
    assert "model.weight" in report.left
    assert "optimizer.0.moment" in report.left
    assert "optimizer.0.moment" in report.unused


def test_names_can_be_mapped(saved: Path) -> None:
    found: State = {"net": {"half": torch.zeros(17, dtype=torch.bfloat16)}, "m": torch.zeros(50, 6)}
    load(found, saved, rename={"net.*": "model.*", "m": "optimizer.0.moment"})
    assert found["net"]["half"].equal(state_of(1)["model"]["half"])
    assert found["m"].equal(state_of(1)["optimizer"][0]["moment"])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("only", ["modle.*", ["modle.*", "note2"], []])
def test_choice_of_nothing_is_refused(saved: Path, only: str | list[str], *, strict: bool) -> None:
    with pytest.raises(UsageError, match=r"No part of the state matches only=.* for example 'model\."):
        load({"model": {"counts": torch.zeros(9)}}, saved, only=only, strict=strict)
    with pytest.raises(UsageError, match="No part of the state matches only="):
        load({"net": {"counts": torch.zeros(9)}}, saved, only="model.*", strict=strict)


def test_patterns_that_match_nothing_are_told(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"note": "", "new": 1}
    # The checkpoint lacks one of these, and this state the other: each has a use.
    load(state, saved, exclude=["new", "betas"])
    load(state, saved, only="new", strict=False)
    assert [record.getMessage() for record in caplog.records] == [
        "Missing from the checkpoint, left unchanged: new"
    ]
    caplog.clear()
    rename = {"nte": "note", "new*": "note*"}
    load(state, saved, only=["n*", "nto"], exclude=["new", "ntoe"], rename=rename)
    assert [record.message for record in caplog.records] == [
        "No part of the state matches only='nto', exclude='ntoe', rename='nte'"
    ]


def test_missing_parts_stay_unchanged_if_not_strict(saved: Path) -> None:
    found: State = {"note": "", "extra": torch.ones(3)}
    report = load(found, saved, strict=False)
    assert found["note"] == "seed 1"
    assert found["extra"].equal(torch.ones(3))
    assert report.left == ("extra",)


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (
            {"modle": {"half": torch.zeros(17)}},
            "does not hold 'modle.half'.*most similar name is 'model.half'",
        ),
        ({"note": torch.zeros(3)}, "'note' is a tensor in the state, but 'note' is an object"),
        ({"model": {"half": 5}}, "'model.half' is an object in the state"),
        ({"model": {"half": torch.zeros(18)}}, r"is \[18\] in the state and \[17\] in the checkpoint"),
        ({"model": {"half": torch.zeros(17)}}, "is float32 in the state and bfloat16 in the checkpoint"),
        ({"model": {"half": torch.zeros(17, device="meta")}}, "is on the meta device"),
    ],
)
def test_a_state_that_does_not_match_is_refused(saved: Path, state: State, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        load(state, saved)


def test_another_dtype_is_converted_on_request(saved: Path) -> None:
    found = {"model": {"half": torch.zeros(17), "counts": torch.zeros(9, dtype=torch.int8)}}
    load(found, saved, convert_dtypes=True)
    assert found["model"]["half"].equal(state_of(1)["model"]["half"].float())
    assert found["model"]["counts"].tolist() == list(range(9))
    reader = Reader(saved, convert_dtypes=True)
    again = {"model": {"half": torch.zeros(17)}}
    stock_load(again, storage_reader=reader, planner=LoadPlanner())
    assert again["model"]["half"].equal(found["model"]["half"])


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="does not exist"):
        load({"w": torch.zeros(1)}, tmp_path / "absent")


class Rows:
    """Some rows of a larger tensor, as one rank of many holds them, in torch's words."""

    def __init__(self, first: int, num_rows: int, whole: torch.Tensor) -> None:
        self.dtype = whole.dtype
        self.memory = torch.zeros(num_rows, *whole.shape[1:])
        self._first = first
        self._size = whole.size()

    def size(self) -> torch.Size:
        return self._size

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((self._first, 0)), self.memory.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.memory


def test_an_eighth_of_the_rows_reads_an_eighth_of_the_bytes(tmp_path: Path) -> None:
    big = torch.arange(1 << 21, dtype=torch.float32).reshape(2048, 1024)
    save({"w": big}, tmp_path / "step")
    checkpoint = open_checkpoint(tmp_path / "step")
    rows = Rows(512, 256, big)
    with borrowed_comm() as comm:
        report = CheckpointLoader().load_from({"w": rows}, checkpoint, comm, LoadChoice())
    assert rows.memory.equal(big[512:768])
    assert report.read_bytes <= 1.1 / 8 * big.nbytes


def spoil(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def largest_file(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("place", ["envelope", "payload", "last byte"])
def test_a_flipped_bit_is_found_and_named(saved: Path, place: str) -> None:
    path = largest_file(saved)
    stored = open_checkpoint(saved).index.stored
    rows = [row for row in range(len(stored)) if stored.item_bytes[row] > 50_000]
    begin, payload = int(stored.item_offset[rows[0]]), int(stored.payload_offset[rows[0]])
    at = {
        "envelope": begin + 5,
        "payload": payload + 1000,
        "last byte": begin + int(stored.item_bytes[rows[0]]) - 1,
    }
    spoil(path, at[place])
    with pytest.raises(DataDamaged, match=r"model.weight is not as it was written") as caught:
        load(state_of(2), saved)
    assert f"{path.name}, bytes {begin} to" in str(caught.value)


def test_truncated_and_missing_files_are_errors(saved: Path) -> None:
    path = largest_file(saved)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(PenstockError, match=path.name):
        load(state_of(2), saved)
    path.unlink()
    with pytest.raises(ObjectNotFound, match=path.name):
        load(state_of(2), saved)


def test_items_that_torch_compressed_are_unpacked(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "step", _extensions=[ZStandard()])
    stock_save(state_of(1), storage_writer=writer)
    for loader in LOADERS.values():
        found = state_of(2)
        loader(found, tmp_path / "step")
        assert_same(found, state_of(1))


def test_stock_tensors_in_another_order_are_loaded_whole(tmp_path: Path) -> None:
    turned = torch.arange(600.0).reshape(20, 30).t()
    stock({"w": turned}, tmp_path / "step")
    found = {"w": torch.zeros(30, 20)}
    load(found, tmp_path / "step")
    assert found["w"].equal(turned)


def test_conjugate_views_in_stock_checkpoints_are_resolved(
    tmp_path: Path,
) -> None:
    tensor = torch.randn(6, 5, dtype=torch.complex64).conj()
    stock({"c": tensor, "turned": tensor.t()}, tmp_path / "step")
    for loader in LOADERS.values():
        found: State = {
            "c": torch.zeros(6, 5, dtype=torch.complex64),
            "turned": torch.zeros(5, 6, dtype=torch.cfloat),
        }
        loader(found, tmp_path / "step")
        assert found["c"].equal(tensor)
        assert found["turned"].equal(tensor.t())


@pytest.mark.parametrize("flipped", [None, 9 << 20])
def test_unaligned_storage_is_read_directly_into_tensors(tmp_path: Path, flipped: int | None) -> None:
    big = torch.arange(3 << 20, dtype=torch.float32)
    save({"big": big, "small": torch.ones(3)}, tmp_path / "step")
    storage = MemoryStorage()
    for path in (tmp_path / "step").iterdir():
        content = bytearray(path.read_bytes())
        if flipped is not None and len(content) > flipped:
            content[flipped] ^= 1
        write_object(storage, f"step/{path.name}", [content])
    found = {"big": torch.zeros(3 << 20), "small": torch.zeros(3)}
    checkpoint = open_folder(storage, "step", "mem://store/step")
    small_blocks = ReadSettings(streams=3, block_bytes=1 << 20)
    with borrowed_comm() as comm, closing(CheckpointLoader(small_blocks)) as loader:
        if flipped is not None:
            with pytest.raises(DataDamaged, match="big is not as it was written"):
                loader.load_from(found, checkpoint, comm, LoadChoice())
            return
        loader.load_from(found, checkpoint, comm, LoadChoice())
    assert_same(found, {"big": big, "small": torch.ones(3)})


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


@pytest.mark.parametrize("loader", LOADERS)
def test_no_code_runs_unless_it_is_trusted(
    tmp_path: Path, loader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stock({"thing": Harmful(), "w": torch.ones(2)}, tmp_path / "step")
    found = {"thing": None, "w": torch.zeros(2)}
    with pytest.raises(BaseException, match="more than data"):
        LOADERS[loader](found, tmp_path / "step")
    assert capsys.readouterr().out == ""
    assert found["thing"] is None
    load(found, tmp_path / "step", trust=True)
    assert capsys.readouterr().out == "this ran\n"


class Counter:
    """A part that makes and takes its own state."""

    def __init__(self, count: int) -> None:
        self.count = torch.tensor(count)
        self.taken: State = {}

    def state_dict(self) -> State:
        return {"count": self.count, "name": f"count {int(self.count)}"}

    def load_state_dict(self, state: State) -> None:
        self.taken = state


def test_stateful_parts_load_after_everything_is_read(tmp_path: Path) -> None:
    save({"counter": Counter(3)}, tmp_path / "step")
    part = Counter(0)
    load({"counter": part}, tmp_path / "step")
    assert part.taken == {"count": torch.tensor(3), "name": "count 3"}
    with pytest.raises(UsageError):
        load({"counter": Counter(0), "other": torch.ones(1)}, tmp_path / "step")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: torch.nn.LazyLinear(2).weight, "'w' belongs to a lazy module and has no shape yet"),
        (
            lambda: TwoTensor(torch.ones(2), torch.ones(2)),  # type: ignore[no-untyped-call]
            "'w' is a TwoTensor, whose elements",
        ),
    ],
    ids=["lazy", "wrapper"],
)
def test_tensor_without_elements_of_its_own_is_refused_by_name(
    tmp_path: Path, value: Callable[[], torch.Tensor], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        save({"w": value()}, tmp_path / "step")


def test_bytes_streams_are_objects_like_others(tmp_path: Path) -> None:
    held = io.BytesIO()
    torch.save([1, 2], held)
    save({"blob": held}, tmp_path / "step")
    found: State = {"blob": None}
    load(found, tmp_path / "step")
    assert found["blob"].getvalue() == held.getvalue()
    found["blob"].seek(0)
    assert torch.load(found["blob"]) == [1, 2]


@pytest.mark.parametrize(
    "place",
    [torch.zeros(3, 1).expand(3, 4), torch.zeros(8).as_strided((3, 4), (2, 1))],
    ids=["expanded", "windows"],
)
def test_place_whose_elements_share_memory_is_refused(tmp_path: Path, place: torch.Tensor) -> None:
    save({"w": torch.ones(3, 4)}, tmp_path / "saved")
    with pytest.raises(UsageError, match="Elements of 'w' share memory"):
        load({"w": place}, tmp_path / "saved")


def test_tied_places_get_one_value_or_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {"a": torch.full((3, 4), torch.nan), "b": torch.full((3, 4), torch.nan), "c": torch.ones(3, 4)}
    save(saved, tmp_path / "ours")
    stock_save(saved, checkpoint_id=tmp_path / "stock", no_dist=True)
    for path in (tmp_path / "ours", tmp_path / "stock"):
        tied = torch.zeros(3, 4)
        load({"a": tied, "b": tied}, path)
        assert tied.isnan().all()
        with pytest.raises(UsageError, match="'a' and 'c' are one tensor in the state, and two different"):
            load({"a": tied, "c": tied}, path)
        load({"a": tied, "c": tied}, path, strict=False)
        assert tied.isnan().all()
        assert "it has the values of 'a'" in caplog.text


MATRIX = torch.arange(16.0).reshape(4, 4)


def test_transposed_places_get_one_value_or_are_refused(tmp_path: Path) -> None:
    save({"a": MATRIX, "b": MATRIX.t().clone(), "c": MATRIX.clone()}, tmp_path / "saved")
    place = torch.zeros(4, 4)
    load({"a": place, "b": place.t()}, tmp_path / "saved")
    assert torch.equal(place, MATRIX)
    with pytest.raises(UsageError, match="'a' and 'c' are one tensor in the state, and two different"):
        load({"a": place, "c": place.t()}, tmp_path / "saved")


def test_tied_autoencoder_is_not_loaded_from_an_untied_one(tmp_path: Path) -> None:
    encoder, decoder, other = (torch.nn.Linear(3, 3, bias=False) for _ in range(3))
    save({"m": torch.nn.ModuleList([encoder, other])}, tmp_path / "untied")
    decoder.weight = torch.nn.Parameter(encoder.weight.data.t())
    tied = torch.nn.ModuleList([encoder, decoder])
    with pytest.raises(UsageError, match=r"'m.0.weight' and 'm.1.weight' are one tensor in the state"):
        load({"m": tied}, tmp_path / "untied")
    save({"m": tied}, tmp_path / "tied")
    wanted = encoder.weight.detach().clone()
    encoder.weight.detach().zero_()
    load({"m": tied}, tmp_path / "tied")
    assert torch.equal(encoder.weight, wanted)


class Copying:
    """An object whose state shares memory with a tensor until it is loaded."""

    def __init__(self, **held: torch.Tensor) -> None:
        self.held = held

    def state_dict(self) -> State:
        return self.held

    def load_state_dict(self, state: State) -> None:
        self.held = {name: each.clone() for name, each in state.items()}


def test_objects_that_copy_their_state_get_their_own_values_from_shared_memory(tmp_path: Path) -> None:
    save({"a": Copying(x=MATRIX, y=MATRIX + 1), "b": MATRIX + 2}, tmp_path / "saved")
    place = torch.zeros(4, 4)
    part = Copying(x=place, y=place.t())
    load({"a": part, "b": place}, tmp_path / "saved")
    assert torch.equal(place, MATRIX + 2)
    assert torch.equal(part.held["x"], MATRIX)
    assert torch.equal(part.held["y"], MATRIX + 1)


PLACE = torch.zeros(12, 12)
COMPLEX = torch.zeros(12, dtype=torch.complex64)
PARTLY_SHARED = {
    "rows": (PLACE[:3], PLACE[2:]),
    "columns": (PLACE[:, :3], PLACE[:, 2:]),
    "every second and fourth row": (PLACE[::2], PLACE[::4]),
    "a row and a column": (PLACE[3], PLACE[:, 4]),
    "a number and its real part": (COMPLEX, COMPLEX.real),
    "a matrix and its transposed part": (PLACE, PLACE[:, :3].t()),
    "the third place that is not the first": (PLACE[:, :3], PLACE[:, 3:6], PLACE[:, 2:4]),
}
DISJOINT = {
    "columns": (PLACE[:, :4], PLACE[:, 4:8], PLACE[:, 8:]),
    "odd and even rows": (PLACE[::2], PLACE[1::2]),
    "interleaved columns": tuple(PLACE[:, number::3].t() for number in range(3)),
    "corners": (PLACE[:6, :6], PLACE[6:, 6:], PLACE[:6, 6:].t(), PLACE[6:, :6]),
    "real and imaginary parts": (COMPLEX.real, COMPLEX.imag),
}


@pytest.mark.parametrize("which", PARTLY_SHARED)
def test_places_that_share_a_part_of_their_memory_are_refused(tmp_path: Path, which: str) -> None:
    state = {f"t{number}": place for number, place in enumerate(PARTLY_SHARED[which])}
    save(state, tmp_path / "saved")
    with pytest.raises(UsageError, match=r"'t\d' and 't\d' share a part of their memory"):
        load(state, tmp_path / "saved")


@pytest.mark.parametrize("which", DISJOINT)
def test_places_whose_elements_alternate_in_memory_are_loaded(tmp_path: Path, which: str) -> None:
    state = {f"t{number}": place for number, place in enumerate(DISJOINT[which])}
    saved = {name: torch.rand_like(place) for name, place in state.items()}
    save(saved, tmp_path / "saved")
    load(state, tmp_path / "saved")
    assert all(torch.equal(place, saved[name]) for name, place in state.items())


@pytest.mark.parametrize(
    "place",
    [torch.zeros(4, 3).t(), torch.zeros(6, 8)[::2, ::2], torch.zeros(20).as_strided((3, 4), (2, 5))],
    ids=["transposed", "strided", "interleaved"],
)
def test_place_with_gaps_or_in_another_order_is_loaded(tmp_path: Path, place: torch.Tensor) -> None:
    expected = torch.arange(12.0).reshape(3, 4)
    save({"w": expected}, tmp_path / "saved")
    load({"w": place}, tmp_path / "saved")
    assert torch.equal(place, expected)
