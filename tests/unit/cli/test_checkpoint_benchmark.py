"""`penstock checkpoint size` and `models`: figures, proof, JSON, and what is said to mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code = main(["checkpoint", *words, "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)


def test_the_document_has_every_rank_with_its_files_and_the_total(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, "size", "llama3-70b", "--ranks", "64")
    assert found["total_bytes"] == 14 * 69_882_617_856 == sum(rank["bytes"] for rank in found["ranks"])
    assert [rank["rank"] for rank in found["ranks"]] == list(range(64))
    for rank in found["ranks"]:
        assert rank["bytes"] == sum(file["bytes"] for file in rank["files"])
    assert found["ranks"][9]["files"][0]["name"] == "zero_pp_rank_1_mp_rank_1_model_states.pt"
    assert found["proof"][0] == ("69,882,617,856 parameters x (2 B fp16 + 3 x 4 B fp32) = 978,356,649,984 B")
    assert "one checkpoint: 978,356,649,984 B = 911.1656 GiB = 978.3566 GB in 128 files" in found["proof"]


def test_people_see_gib_and_gb_of_a_rank_and_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "size", "llama3-8b"]) == 0
    said = capsys.readouterr()
    for text in ("0 to 7", "13.088", "14.053", "104.7027 GiB", "112.4237 GB", "tensor 1 x pipeline 1"):
        assert text in said.out
    assert said.err == ""


def test_the_studys_six_checkpoints_are_given_to_the_last_digit(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "size", "megatron-study")
    assert found["checkpoints"] == 6
    assert found["all_checkpoints_gib"] == 577.07171420753
    assert found["proof"][-1].endswith("= 577.07171420753 GiB")


def test_a_scaled_checkpoint_of_few_processes_says_that_they_carry_several_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, "size", "llama3-405b", "--ranks", "2", "--scale", "0.1%")
    assert found["total_bytes"] == pytest.approx(14 * 405_853_388_800 / 1000, rel=0.01)
    assert found["is_folded"] is True
    assert len(found["ranks"]) == 2
    assert "2 processes carry 512 ranks, several each" in found["proof"]


def test_a_subset_is_smaller_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "size", "llama3-70b", "--ranks", "8", "--subset")
    assert found["is_subset"] is True
    assert found["total_bytes"] * 8 == pytest.approx(14 * 69_882_617_856, rel=1e-6)
    assert "a subset: the first 8 of them write, and no others" in found["proof"]


def test_models_are_listed_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    found = {model["name"]: model for model in document(capsys, "models")["models"]}
    assert found["llama3-1t"]["total_bytes"] == 14 * 1_183_194_060_048
    assert found["llama3-8b"]["also"] == ["llama_8b_zero3"]
    assert main(["checkpoint", "models"]) == 0
    assert "911 GiB in 128 files of 64 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("size", "lama3-8b"), "Did you mean llama3-8b?"),
        (("size", "llama3-8b", "--scale", "big"), "--scale"),
        (("size", "llama3-70b", "--ranks", "100"), "a multiple of 8"),
        (("size", "llama3-8b", "--set", "model.num_layer=2"), "did you mean model.num_layers?"),
        (("size", "absent.yaml"), "Name a YAML file"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_mistake(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["checkpoint", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_of_ones_own_is_sized_from_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("ranks: 2\nfiles:\n  - {name: 'part-{rank}.pt', parts: [4096, 100]}\n")
    found = document(capsys, "size", str(path))
    assert found["total_bytes"] == 2 * 4196
    assert found["ranks"][1]["files"] == [{"name": "part-1.pt", "bytes": 4196}]
