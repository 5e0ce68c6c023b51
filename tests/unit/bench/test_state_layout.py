"""Layouts: totals typed a second time, and properties over all kinds of parallelism."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.state_layout import (
    StateLayout,
    checkpoint_folder,
    count_parameters,
    even_share,
    plan_layout,
    stage_of_layer,
)
from penstock.errors import UsageError
from penstock.workload.enums import CheckpointMode, CheckpointWriters, Datatype
from penstock.workload.load_workload import CheckpointModel, load_model
from penstock.workload.shipped_catalog import cards
from penstock.workload.spec import CheckpointSection, Model, Parallelism, Transformer, Workload

GIB = 2**30


def model_of(spec: Model, *, num_ranks: int | None = None, everyone: bool = False) -> CheckpointModel:
    writers = CheckpointWriters.ALL_RANKS if everyone else CheckpointWriters.RANK_ZERO
    workload = Workload(name="own", model=spec, checkpoint=CheckpointSection(type=writers))
    return CheckpointModel(about="", num_ranks=num_ranks, workload=workload)


@cache
def layout_of(name: str, num_processes: int | None = None, *, scale: str = "1") -> StateLayout:
    return plan_layout(load_model(name), num_processes=num_processes, scale=Fraction(scale))


def sizes_by_process(layout: StateLayout) -> list[int]:
    """The second way: file by file."""
    return [
        sum(file.size_bytes for file in layout.files_of(process)) for process in range(layout.num_processes)
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "parameters", "gib", "files"),
    [
        ("llama3-8b", 8, 8_030_261_248, "104.7", 16),
        ("llama3-70b", 64, 69_882_617_856, "911.2", 128),
        ("llama3-405b", 512, 405_853_388_800, "5291.7", 1032 + 512),
        ("llama3-1t", 1024, 1_183_194_060_048, "15427.1", 1048 + 1024),
        ("llama_7b", 8, 6_738_415_616, "87.9", 1 + 8),
        ("llama_7b_zero3", 8, 6_738_415_616, "87.9", 16),
        ("llama_70b", 64, 69_882_617_856, "911.2", 664 + 64),
    ],
)
def test_a_shipped_model_has_these_parameters_bytes_and_files(
    name: str, ranks: int, parameters: int, gib: str, files: int
) -> None:
    layout = layout_of(name)
    assert (layout.num_processes, layout.num_parameters, layout.num_files) == (ranks, parameters, files)
    assert layout.total_bytes == 14 * parameters
    assert f"{layout.total_bytes / GIB:.1f}" == gib


def test_six_checkpoints_of_the_study_have_its_bytes_to_the_last_digit() -> None:
    layout = layout_of("megatron-study")
    assert 6 * layout.total_bytes / GIB == 577.07171420753
    assert 6 * layout.total_bytes == 96 * 5_625_371_495 + 528 * 150_733_735 + 96 * 30_827
    first = [file.key for file in layout.files_of(0, epoch=1, step=600)]
    assert first[:3] == ["model-1-600-0.pt", "layer-0-1-600-0.pt", "layer-1-1-600-0.pt"]
    assert first[-1] == "optimizer-1-600-0.pt"
    assert [sum(1 for _ in layout.files_of(rank)) for rank in (0, 1, 7, 8, 15)] == [46, 2, 2, 46, 2]


def test_ranks_of_405b_hold_what_the_published_tables_say() -> None:
    by_rank = layout_of("llama3-405b").bytes_of_processes() / GIB
    assert 11.0 < by_rank[:256].min() < by_rank[:256].mean() < 11.83 < by_rank[:256].max() < 12.4
    assert np.allclose(by_rank[256:], 8.859, atol=0.001)


def test_files_have_deepspeeds_names() -> None:
    layers = [file.key for file in layout_of("llama3-405b").files_of(0)]
    assert layers == [
        *(f"layer_{number}-model_0_model_states.pt" for number in range(5)),
        "zero_pp_rank_0_mp_rank_0_optim_states.pt",
    ]
    assert [file.key for file in layout_of("llama3-70b").files_of(13)] == [
        "zero_pp_rank_1_mp_rank_5_model_states.pt",
        "zero_pp_rank_1_mp_rank_5_optim_states.pt",
    ]
    assert next(iter(layout_of("llama_7b").files_of(0))).key == "model_0_model_states.pt"
    assert checkpoint_folder(1, 3) == "global_epoch1_step3"


dimensions = st.builds(
    Transformer,
    vocab_size=st.integers(1, 400),
    hidden_size=st.integers(1, 96),
    ffn_hidden_size=st.integers(1, 200),
    num_attention_heads=st.integers(1, 8),
    num_kv_heads=st.integers(1, 8),
)
splits = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(0, 3)).map(
    lambda split: Parallelism(
        tensor=split[0], pipeline=1 if split[3] == 3 else split[1], data=split[2], zero_stage=split[3]
    )
)


@given(
    dims=dimensions,
    num_layers=st.integers(1, 9),
    split=splits,
    scale=st.fractions(Fraction(1, 50), 1, max_denominator=1000),
    num_processes=st.integers(1, 40),
)
def test_ranks_add_up_to_the_total_that_parameters_give(
    dims: Transformer, num_layers: int, split: Parallelism, scale: Fraction, num_processes: int
) -> None:
    spec = Model(num_layers=num_layers, transformer=dims, parallelism=split)
    mesh_ranks = split.tensor * split.pipeline * (split.data or 1)
    model = model_of(spec, num_ranks=mesh_ranks)
    whole = plan_layout(model)
    assert whole.total_bytes == 14 * count_parameters(spec)
    assert sizes_by_process(whole) == whole.bytes_of_processes().tolist()
    fewer = plan_layout(model, num_processes=min(num_processes, mesh_ranks))
    assert sizes_by_process(fewer) == fewer.bytes_of_processes().tolist()
    assert fewer.total_bytes == whole.total_bytes
    small = plan_layout(model, scale=scale)
    assert sizes_by_process(small) == small.bytes_of_processes().tolist()
    assert small.full_bytes == whole.full_bytes == whole.total_bytes
    assert abs(small.total_bytes - whole.total_bytes * scale) <= small.num_files
    assert all(file.size_bytes for rank in range(mesh_ranks) for file in small.files_of(rank))


@given(splits, st.data())
def test_files_have_different_names_and_each_rank_its_own(split: Parallelism, data: st.DataObject) -> None:
    spec = Model(num_layers=3, transformer=Transformer(vocab_size=300, hidden_size=64), parallelism=split)
    mesh_ranks = split.tensor * split.pipeline * (split.data or 1)
    processes = data.draw(st.integers(1, mesh_ranks))
    layout = plan_layout(model_of(spec, num_ranks=mesh_ranks), num_processes=processes)
    names = [file.key for process in range(processes) for file in layout.files_of(process)]
    assert len(set(names)) == len(names) == layout.num_files
    edges = [layout.ranks_of(process) for process in range(processes)]
    assert edges[0].start == 0
    assert edges[-1].stop == layout.num_carried
    assert all(before.stop == after.start for before, after in pairwise(edges))


@given(st.integers(0, 10**12), st.integers(1, 5000))
def test_shares_differ_by_one_at_most_and_add_up(whole: int, parts: int) -> None:
    shares = even_share(whole, parts, np.arange(parts, dtype=np.int64))
    assert shares.sum() == whole
    assert shares.max() - shares.min() <= 1


@given(st.integers(1, 200), st.integers(1, 70))
def test_layers_fill_stages_in_order_and_early_ones_first(num_layers: int, num_stages: int) -> None:
    stages = [
        stage_of_layer(layer, num_layers=num_layers, num_stages=num_stages)
        for layer in range(1, num_layers + 1)
    ]
    held = [stages.count(stage) for stage in range(num_stages)]
    assert stages == sorted(stages)
    assert sum(held) == num_layers
    assert held == sorted(held, reverse=True)
    assert max(held) - min(held) <= 1


def test_the_total_does_not_depend_on_the_number_of_ranks() -> None:
    wanted = layout_of("llama3-70b").total_bytes
    for num_processes in (1, 3, 4, 8, 24, 64, 128):
        layout = layout_of("llama3-70b", num_processes)
        assert layout.total_bytes == wanted
        assert layout.num_processes == num_processes
        assert layout.is_folded is (num_processes % 8 != 0)


def test_a_subset_is_the_first_ranks_of_the_whole() -> None:
    layout = plan_layout(load_model("llama3-70b"), num_processes=8, mode=CheckpointMode.SUBSET)
    whole = layout_of("llama3-70b")
    assert layout.is_subset
    assert not layout.is_folded
    assert [list(layout.files_of(rank)) for rank in range(8)] == [list(whole.files_of(r)) for r in range(8)]
    assert layout.total_bytes == sum(sizes_by_process(whole)[:8])
    assert layout.num_files == 16


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-405b", "megatron-study"])
@pytest.mark.parametrize("scale", ["0.01", "1/3", "0.0001"])
def test_a_scaled_checkpoint_keeps_its_files_and_a_share_of_its_bytes(name: str, scale: str) -> None:
    small, whole = layout_of(name, scale=scale), layout_of(name)
    assert small.num_files == whole.num_files
    assert small.total_bytes == pytest.approx(float(whole.total_bytes * Fraction(scale)), rel=0.01)


def test_explicit_sizes_are_divided_as_dlio_divides_them() -> None:
    spec = Model(
        model_size_bytes=100,
        num_layers=3,
        layer_parameters=(10, 4),
        optimization_groups=(7, 5),
        model_datatype=Datatype.FP16,
        parallelism=Parallelism(tensor=2, pipeline=2),
    )
    layout = plan_layout(model_of(spec), num_processes=8)
    assert {file.key: file.size_bytes for file in layout.files_of(0)} == {
        "model_states-0.pt": 100,
        "layer_1-model_0_model_states.pt": 14,
        "layer_2-model_0_model_states.pt": 14,
        "zero_pp_rank_0_mp_rank_0_optim_states.pt": 3 * 12 * 4,
    }
    assert [file.key for file in layout.files_of(3)] == [
        "model_states-3.pt",
        "layer_3-model_3_model_states.pt",
        "zero_pp_rank_0_mp_rank_3_optim_states.pt",
    ]
    assert list(layout.files_of(4)) == []
    sharded = replace(spec, parallelism=Parallelism(tensor=2, pipeline=2, zero_stage=1))
    second = plan_layout(model_of(sharded), num_processes=8).files_of(4)
    assert [file.key for file in second] == ["zero_pp_rank_1_mp_rank_0_optim_states.pt"]


@pytest.mark.parametrize(
    ("zero_stage", "files"),
    [
        (0, ["model_0_model_states.pt", "model_1_model_states.pt"]),
        (1, ["model_0_model_states.pt", "model_1_model_states.pt"]),
        (3, [f"zero_pp_rank_{dp}_mp_rank_{mp}_model_states.pt" for dp in range(2) for mp in range(2)]),
    ],
)
def test_explicit_layers_without_a_pipeline_share_a_file_as_those_of_transformers(
    zero_stage: int, files: list[str]
) -> None:
    spec = Model(
        num_layers=3, layer_parameters=(10, 6), parallelism=Parallelism(tensor=2, zero_stage=zero_stage)
    )
    layout = plan_layout(model_of(spec), num_processes=4)
    named = {file.key: file.size_bytes for rank in range(4) for file in layout.files_of(rank)}
    layers = [name for name in named if name.endswith("_model_states.pt")]
    assert layers == files
    assert sum(named[name] for name in layers) == 3 * 16 * 2


def test_plain_bytes_are_written_by_rank_0_or_by_everyone() -> None:
    spec = Model(model_size_bytes=1000)
    alone = plan_layout(model_of(spec), num_processes=4)
    assert alone.bytes_of_processes().tolist() == [1000, 0, 0, 0]
    everyone = plan_layout(model_of(spec, everyone=True), num_processes=4)
    assert everyone.bytes_of_processes().tolist() == [1000] * 4
    assert [file.key for file in everyone.files_of(3)] == ["model_states-3.pt"]


def test_nobody_writes_an_empty_file() -> None:
    """One element of a norm, divided among two: one of them has nothing of it."""
    dims = Transformer(vocab_size=1, hidden_size=1, ffn_hidden_size=1, num_attention_heads=1, num_kv_heads=1)
    spec = Model(num_layers=1, transformer=dims, parallelism=Parallelism(tensor=2, pipeline=2))
    layout = plan_layout(model_of(spec), num_processes=4, scale=Fraction(1, 50))
    files = [file for process in range(4) for file in layout.files_of(process)]
    assert all(file.size_bytes for file in files)
    assert len(files) == layout.num_files


def test_a_model_without_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="holds no bytes"):
        plan_layout(model_of(Model(model_size_bytes=0)))


def test_a_pipeline_under_zero_3_is_refused_with_the_key_to_change() -> None:
    split = Parallelism(pipeline=2, zero_stage=3)
    model = model_of(Model(num_layers=4, transformer=Transformer(), parallelism=split))
    with pytest.raises(UsageError, match=r"model\.parallelism.*zero_stage to at most 2"):
        plan_layout(model)


def test_more_ranks_than_the_layout_has_are_refused_with_the_numbers_that_fit() -> None:
    with pytest.raises(UsageError, match=r"laid out for 64 ranks.*not for 100.*multiple of 8"):
        layout_of("llama3-70b", 100)


@pytest.mark.parametrize("scale", ["0", "-1", "1.5"])
def test_a_scale_that_makes_no_checkpoint_is_refused(scale: str) -> None:
    with pytest.raises(UsageError, match="--scale"):
        layout_of("llama3-8b", scale=scale)


@pytest.mark.parametrize("num_checked", [40, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", cards())
def test_the_files_of_every_card_are_what_its_arrays_say(name: str, num_checked: int) -> None:
    layout = layout_of(name)
    expected = layout.bytes_of_processes().tolist()
    for process in range(0, layout.num_processes, max(1, layout.num_processes // num_checked)):
        assert sum(file.size_bytes for file in layout.files_of(process)) == expected[process]
