"""Bytes of a token to the byte, and sizes of workloads."""

import json
from pathlib import Path

import pytest
from tests.unit.kvcache.test_lru_simulation import trace_of

from penstock.cli import main
from penstock.errors import UsageError
from penstock.kvcache.models import (
    MODELS,
    UPSTREAM_BYTES_PER_TOKEN,
    find_model,
    size_for_trace,
    size_for_users,
)

BYTES_PER_TOKEN = {
    "tiny-1b": 24_576,
    "mistral-7b": 131_072,
    "llama2-7b": 524_288,
    "llama3.1-8b": 131_072,
    "llama3.1-70b-instruct": 327_680,
    "deepseek-v3": 70_272,
    "qwen3-32b": 262_144,
    "gpt-oss-120b": 73_728,
    "gpt-oss-20b": 49_152,
    "glm5": 109_824,
    "kimi-k2.6": 70_272,
}


def test_bytes_of_a_token_are_right_to_the_byte() -> None:
    assert {name: model.bytes_per_token for name, model in MODELS.items()} == BYTES_PER_TOKEN
    kinds = {name: model.attention for name, model in MODELS.items()}
    assert (kinds["llama2-7b"], kinds["qwen3-32b"], kinds["glm5"]) == ("mha", "gqa", "mla")


def test_ranks_divide_heads_and_layers_but_not_the_latent() -> None:
    large, latent = MODELS["llama3.1-70b-instruct"], MODELS["deepseek-v3"]
    assert 256 * large.rank_bytes_per_token(tensor=8) == 10 << 20
    assert large.rank_bytes_per_token(tensor=16) == large.rank_bytes_per_token(tensor=8)
    assert latent.rank_bytes_per_token(tensor=8) == latent.bytes_per_token
    assert large.rank_bytes_per_token(pipeline=3) == 27 * large.layer_bytes_per_token


@pytest.mark.parametrize(
    ("model", "ranks", "shown", "noted"),
    [
        ("llama3.1-8b", (4, 2), "each of 8 ranks keeps at most 16,384 B a token = 1 GiB", ""),
        (
            "llama3.1-8b",
            (3, 1),
            "each of 3 ranks keeps at most 49,152 B a token = 3 GiB",
            "8 KV heads cannot",
        ),
        (
            "llama3.1-8b",
            (16, 1),
            "each of 16 ranks keeps at most 16,384 B a token = 1 GiB",
            "8 KV heads cannot",
        ),
        ("llama3.1-8b", (1, 5), "each of 5 ranks keeps at most 28,672 B a token", "32 layers cannot"),
        ("deepseek-v3", (8, 1), "each of 8 ranks keeps at most 70,272 B a token", "latent of MLA cannot"),
        ("llama3.1-8b", (1, 1), "users x", ""),
    ],
)
def test_the_bytes_of_a_rank_are_shown_and_uneven_divisions_noted(
    model: str, ranks: tuple[int, int], shown: str, noted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["kvcache", "size", "--model", model, "--users", "8", "--tokens", "8192"]
    words += ["--tensor-parallel", str(ranks[0]), "--pipeline-parallel", str(ranks[1])]
    assert main(words) == 0
    told = capsys.readouterr()
    assert shown in told.out
    assert ("ranks" in told.out) == (ranks != (1, 1))
    assert noted in told.err if noted else not told.err


def test_a_configuration_and_changes_describe_a_model_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "hidden_size": 7168,
                "torch_dtype": "bfloat16",
            }
        )
    )
    assert find_model(str(path)).bytes_per_token == BYTES_PER_TOKEN["deepseek-v3"]
    assert find_model("llama3.1-8b", dtype="int8").bytes_per_token == 32 * 2048
    path.write_text('{"num_attention_heads": 4}')
    with pytest.raises(UsageError, match="num_hidden_layers"):
        find_model(str(path))
    with pytest.raises(UsageError, match=r"llama3\.1-8b"):
        find_model("llama3.1-8")


def test_sizes_are_as_many_times_larger_as_the_tables_differ() -> None:
    times = {}
    for name in UPSTREAM_BYTES_PER_TOKEN:
        document = size_for_users(MODELS[name], 10)
        assert document["total_bytes"] == 10 * document["tokens_per_user"] * BYTES_PER_TOKEN[name]
        times[name] = document["total_bytes"] / document["upstream"]["total_bytes"]
    assert list(times.values()) == [32, 32, 64, 32, 20]
    assert size_for_users(MODELS["glm5"], 1)["upstream"] is None


def test_size_of_a_trace_says_which_cache_has_which_share_of_hits() -> None:
    document = size_for_trace(trace_of([[0, 1], [2], [0, 1], [3, 4, 5], [3, 4, 5]]), MODELS["llama3.1-8b"])
    assert document["unique_bytes"] == 6 * (64 << 20)
    assert document["hit_bytes"] == 5 * (64 << 20)
    assert [row["capacity_blocks"] for row in document["capacities"]] == [3, 3, 3]


def test_commands_print_their_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    requests = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [4, 5]}] * 2
    trace.write_text("\n".join(map(json.dumps, requests)))
    assert main(["kvcache", "simulate", str(trace), "--blocks", "1,2", "--gpu", "64MiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["requests"], document["blocks"], document["unique_blocks"]) == (2, 4, 2)
    assert [(row["capacity_blocks"], row["prefix_hit_ratio"]) for row in document["rows"]] == [
        (1, 0.0),
        (2, 0.5),
        (None, 0.5),
    ]
    assert [tier["hit_blocks"] for tier in document["tiers"]] == [0, 0, 2]
    page = tmp_path / "page.html"
    assert main(["kvcache", "simulate", str(trace), "--page", str(page)]) == 0
    assert "50.0% of all blocks hit" in page.read_text()
    for words in (["simulate", str(trace)], ["size", str(trace)], ["models", "--dtype", "int8"]):
        assert main(["kvcache", *words]) == 0
    shown = capsys.readouterr().out
    assert "32 times too small" in shown
    assert "llama3.1-8b, int8" in shown
