"""Models by name: cards, DLIO's names for them, training workloads, and files of one's own."""

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.workload.load_workload import load, load_model
from penstock.workload.settings import parse_settings
from penstock.workload.shipped_catalog import cards, families, shipped_card

# hidden, FFN, heads, kv heads, layers, vocabulary, tensor, pipeline, data, ZeRO
NUMBERS = """
llama3-8b      4096  14336 32  8  32  128256 1 1  8 3
llama3-70b     8192  28672 128 8  80  128256 8 1  8 3
llama3-405b    16384 53248 128 8  126 128256 8 32 2 1
llama3-1t      25872 98304 192 32 128 128256 8 64 2 1
llama_7b       4096  11008 32  32 32  32000  1 1  8 1
llama_7b_zero3 4096  11008 32  32 32  32000  1 1  8 3
llama_70b      8192  28672 128 8  80  128256 8 4  2 1
"""
ROWS = [line.split() for line in NUMBERS.split("\n") if line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_shipped_model_has_exactly_these_dimensions(row: list[str]) -> None:
    spec = load_model(row[0]).workload.model
    assert spec.transformer is not None
    found = [
        spec.transformer.hidden_size,
        spec.transformer.ffn_hidden_size,
        spec.transformer.num_attention_heads,
        spec.transformer.num_kv_heads,
        spec.num_layers,
        spec.transformer.vocab_size,
        spec.parallelism.tensor,
        spec.parallelism.pipeline,
        spec.parallelism.data,
        spec.parallelism.zero_stage,
    ]
    assert found == [int(text) for text in row[1:]]
    assert load_model(row[0]).num_ranks == int(row[7]) * int(row[8]) * int(row[9])


def test_the_table_and_the_cards_are_the_same_models() -> None:
    assert {row[0] for row in ROWS} | {"megatron-study"} == set(cards())
    assert all(card.about.endswith(".") for card in cards().values())


def test_shipped_models_load_without_remarks_and_ask_for_checkpoints_alone() -> None:
    for name in cards():
        model = load_model(name)
        assert model.remarks == ()
        assert (model.workload.workflow.train, model.workload.workflow.checkpoint) == (False, True)


@pytest.mark.parametrize("name", ["llama_8b_zero3", "llama_70b_zero3", "llama_405b", "llama_1t"])
def test_dlios_name_means_the_same_model_as_ours(name: str) -> None:
    card = shipped_card(name)
    assert card is not None
    assert load(name).workload == load_model(name).workload == load_model(card.name).workload
    asked = load(name).workload.checkpoint
    assert (asked.fsync, asked.time_between_checkpoints_s) == (True, 5.0)
    assert (asked.num_checkpoints_write, asked.num_checkpoints_read) == (10, 10)


def test_no_name_means_two_things() -> None:
    names = [*cards(), *(alias for card in cards().values() for alias in card.aliases), *families()]
    assert len(set(names)) == len(names)


def test_the_model_of_a_training_workload_is_found_by_the_workloads_name() -> None:
    assert load_model("unet3d_h100").workload.model.model_size_bytes == 499153191


def test_overrides_reach_the_model() -> None:
    model = load_model("llama3-8b", overrides=parse_settings(["model.num_layers=2"]))
    assert model.workload.model.num_layers == 2


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_file_of_ones_own_is_a_card_or_a_workload_of_dlios(tmp_path: Path, *, wrapped: bool) -> None:
    path = tmp_path / "mine.yaml"
    sections = "model: {name: mine, num_layers: 2, optimization_groups: [8, 8]}"
    path.write_text(f"about: Small.\nranks: 4\nworkload:\n  {sections}\n" if wrapped else sections)
    model = load_model(str(path))
    assert (model.workload.full_name, model.num_ranks) == ("mine", 4 if wrapped else None)
    assert model.workload.model.optimization_groups == (8, 8)


def test_a_file_may_name_its_files_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("ranks: 2\nfiles:\n  - {name: 'a-{rank}.pt', parts: [5, 7]}\n")
    (rule,) = load_model(str(path)).files
    assert (rule.name, sum(rule.parts), rule.count, rule.every) == ("a-{rank}.pt", 12, 1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ranks: 0\n", "ranks is not understood"),
        ("files:\n  - {name: a, part: [5]}\n", r"files\.0\.parts is not understood.*A rule of files has"),
        ("model: {num_layer: 3}\n", "did you mean model.num_layers"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        load_model(str(path))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean llama3-8b"):
        load_model("lama3-8b")
