"""Checkpoints, event tables and results that version 0.2.0 wrote stay readable (tests/golden/v0.2)."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "v0.2"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "v0.2"))


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def trained() -> dict[str, Any]:
    """The state that was saved."""
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def fresh() -> dict[str, Any]:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1.0),
        "step": 0,
        "losses": None,
        "nested": None,
        "bf16": torch.zeros(3, 2, dtype=torch.bfloat16),
    }


def assert_restored(state: dict[str, Any]) -> None:
    import torch

    # Processors differ in how they round what is trained anew here.
    expected, close = trained(), partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)
    close(state["model"].state_dict(), expected["model"].state_dict())
    found, wanted = state["optimizer"].state_dict(), expected["optimizer"].state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    close(found["state"], wanted["state"])
    assert (state["step"], state["losses"]) == (7, [1.5, 2.25])
    assert state["nested"]["a"][1] == "x"
    assert state["nested"]["a"]["t"].tolist() == [0, 1, 2, 3, 4]
    assert state["nested"]["empty"] == {}
    assert (state["bf16"] == 1.5).all()


def test_a_checkpoint_of_one_rank_loads(written: Path) -> None:
    import penstock.checkpoint as pc

    state = fresh()
    pc.load(state, str(written / "checkpoints" / "one-rank"), exclude="rng")
    assert_restored(state)


def test_shards_of_two_ranks_load_on_one(written: Path) -> None:
    import torch

    import penstock.checkpoint as pc

    state = {**fresh(), "sharded": torch.zeros(6, 4), "replicated": torch.zeros(8)}
    pc.load(state, str(written / "checkpoints" / "two-ranks"), exclude=["rng", "mine*"])
    assert_restored(state)
    assert state["sharded"].flatten().tolist() == list(range(24))
    assert state["replicated"].tolist() == list(range(8))


def test_a_run_goes_on_from_its_newest_step(written: Path) -> None:
    import penstock.checkpoint as pc

    with pc.Manager(str(written / "checkpoints" / "run")) as manager:
        state = fresh()
        assert manager.restore(state, exclude=["rng", "mine*", "sharded", "replicated"]) == 2
        assert_restored(state)
        manager.save(3, state)
        assert manager.restore(fresh()) == 3


def test_checkpoints_are_listed_shown_and_verified(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written / "checkpoints" / "run"
    assert len(run(capsys, "checkpoint", "ls", folder)["checkpoints"]) == 2
    run(capsys, "checkpoint", "show", folder / "step-2")
    run(capsys, "checkpoint", "verify", folder / "step-2")
    run(capsys, "checkpoint", "diff", folder / "step-1", folder / "step-2")


def test_an_event_table_answers_as_it_did(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run(capsys, "trace", "summary", written / "table.events")["rows"]
    expected = json.loads((written / "summary.json").read_text(encoding="utf-8"))
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    run(capsys, "trace", "ops", written / "table.events")
    run(capsys, "trace", "timeline", written / "table.events")


def test_runs_are_listed_shown_compared_and_drawn(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = sorted(path for path in (written / "runs").iterdir() if path.name[0] != ".")
    assert len(run(capsys, "results", "ls", written / "runs")["runs"]) == len(folders) == 2
    for folder in folders:
        run(capsys, "results", "show", folder)
        run(capsys, "results", "page", folder)
        assert (folder / "report.html").stat().st_size > 10_000
    run(capsys, "results", "compare", *folders)
