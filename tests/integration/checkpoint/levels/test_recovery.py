"""Caches after a crash: rebuilt, made durable without the trainer, or dropped."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.rank_threads import ThreadComm, on_ranks
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from penstock.checkpoint.commit.catalog import StepCatalog
from penstock.checkpoint.levels.cache import CacheLevel
from penstock.checkpoint.levels.options import Scheme, Single, Xor
from penstock.checkpoint.levels.recovery import (
    ScavengeReport,
    StepRepair,
    list_cached_steps,
    repair_step,
    scavenge,
)
from penstock.checkpoint.manager.manager import Manager
from penstock.cli import main
from penstock.storage import open_storage

Result = TypeVar("Result")

HOSTS = 4


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {f"rank_{rank}": torch.arange(20_000, dtype=torch.int64) * (rank + 1) + step}


def save(rank: int, root: Path, scheme: Scheme, steps: int) -> None:
    with Manager(
        root / "durable",
        cache=root / f"host-{rank}",
        redundancy=scheme,
        failure_domain=f"host-{rank}",
        flush=None,
        timeout_s=60,
    ) as manager:
        for step in range(1, steps + 1):
            manager.save(step, state_of(rank, step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of four hosts with two steps that were never flushed."""
    root = tmp_path_factory.mktemp("saved")
    on_gloo_ranks(HOSTS, save, root, Xor(group=4), 2)
    return root


@pytest.fixture
def caches(saved: Path, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


@contextmanager
def level(comm: ThreadComm, root: Path, hosts: list[int]) -> Iterator[CacheLevel]:
    storage = open_storage(str(root / f"host-{hosts[comm.rank]}"), {})
    opened = CacheLevel(storage, comm, schemes=[Single()])
    yield opened
    opened.close()


def on_hosts(root: Path, hosts: list[int], work: Callable[[CacheLevel, ThreadComm], Result]) -> Result:
    """What all ranks of a job on these hosts say alike."""

    def program(comm: ThreadComm) -> Result:
        with level(comm, root, hosts) as opened:
            return work(opened, comm)

    first, *others = on_ranks(len(hosts), program)
    assert all(other == first for other in others)
    return first


def rescue(root: Path, hosts: list[int]) -> ScavengeReport:
    durable = StepCatalog(open_storage(str(root / "durable"), {}))
    return on_hosts(
        root, hosts, lambda cache, comm: scavenge(cache, comm, durable, list_cached_steps(cache, comm))
    )


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def require_step(root: Path, step: int) -> None:
    wanted = {key: value for rank in range(HOSTS) for key, value in state_of(rank, step).items()}
    found = {key: torch.zeros_like(value) for key, value in wanted.items()}
    stock_load(found, checkpoint_id=str(root / "durable" / f"step-{step}"), no_dist=True)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_lost_cache_is_full_again(caches: Path) -> None:
    before = files_below(caches / "host-2")
    shutil.rmtree(caches / "host-2")
    mended = on_hosts(
        caches, [0, 1, 2, 3], lambda cache, comm: [repair_step(cache, comm, step) for step in (1, 2)]
    )
    assert mended == [StepRepair(step=1, missing=(2,)), StepRepair(step=2, missing=(2,))]
    after = files_below(caches / "host-2")
    assert {name: after[name] for name in before if "step-" in name} == {
        name: content for name, content in before.items() if "step-" in name
    }


def test_a_flipped_byte_is_rebuilt_unless_checksums_are_skipped(caches: Path) -> None:
    (data,) = (caches / "host-1" / "step-2").glob("*1*.distcp")
    right = data.read_bytes()
    flip(data)
    believed = on_hosts(caches, [0, 1, 2, 3], lambda cache, comm: repair_step(cache, comm, 2, verified=False))
    assert believed.outcome == "whole"
    assert data.read_bytes() != right
    read = on_hosts(caches, [0, 1, 2, 3], lambda cache, comm: repair_step(cache, comm, 2))
    assert read == StepRepair(step=2, damaged=(1,))
    assert read.outcome == "rebuilt"
    assert data.read_bytes() == right


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_surviving_hosts_make_a_step_durable_that_stock_torch_loads(caches: Path) -> None:
    shutil.rmtree(caches / "host-0")
    found = rescue(caches, [1, 2, 3])
    assert found.step == 2
    assert found.looked_at == (StepRepair(step=2, missing=(0,)),)
    require_step(caches, 2)
    names = sorted(path.name for path in (caches / "durable").iterdir())
    assert names == ["latest", "step-2"]
    before = files_below(caches / "durable")
    assert rescue(caches, [1, 2, 3]).step == 2
    assert files_below(caches / "durable") == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_older_step_is_scavenged_if_the_newest_is_beyond_repair(caches: Path) -> None:
    shutil.rmtree(caches / "host-0" / "step-2")
    flip(next((caches / "host-1" / "step-2").glob("*1*.distcp")))
    held = files_below(caches / "host-1" / "step-2")
    found = rescue(caches, [0, 1, 2, 3])
    assert found.step == 1
    newest, _ = found.looked_at
    assert newest.damaged == (1,)
    assert "xor survives 1 loss" in newest.reason
    assert files_below(caches / "host-1" / "step-2") == held
    require_step(caches, 1)


def test_one_loss_too_many_is_reported_and_leaves_nothing(caches: Path) -> None:
    found = rescue(caches, [1, 3])
    assert found.step is None
    assert [each.step for each in found.looked_at] == [2, 1]
    assert all("ranks 0, 2 of one group lost their files" in each.reason for each in found.looked_at)
    assert files_below(caches / "durable") == {}


def test_the_verbs_run_on_a_rank_for_each_cache(caches: Path) -> None:
    shutil.rmtree(caches / "host-3")
    run = [sys.executable, "-m", "penstock", "checkpoint"]
    places = [str(caches / f"host-{host}") for host in range(HOSTS)]
    done = subprocess.run(
        [*run, "rebuild", *places, "--ranks", "4", "--step", "2", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(done.stdout)["steps"]
    assert (step["outcome"], step["missing"]) == ("rebuilt", [3])
    assert (caches / "host-3" / "step-2").is_dir()
    drop = [*run, "drop", *places[2:], "--ranks", "2", "--step", "2", "--json"]
    refused = subprocess.run(drop, check=False, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0
    assert "nothing was dropped" in refused.stderr
    done = subprocess.run([*drop, "--force"], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [each["step"] for each in json.loads(done.stdout)["steps"]] == [2]
    assert [path.parent.name for path in sorted(caches.glob("host-*/step-2"))] == ["host-0", "host-1"]


def test_a_verb_on_a_single_rank_reports_what_it_cannot_do(
    caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, durable = str(caches / "host-0"), str(caches / "durable")
    assert main(["checkpoint", "scavenge", cache, "--to", durable]) == 1
    assert "step 2: ranks 1, 2, 3 of one group lost their files" in capsys.readouterr().err
    assert main(["checkpoint", "rebuild", cache, "--step", "7"]) == 2
    assert "The caches hold: 1, 2." in capsys.readouterr().err
    assert main(["checkpoint", "rebuild", cache, cache]) == 2
    assert "--ranks 2" in capsys.readouterr().err
    assert main(["checkpoint", "rebuild", str(caches / "elsewhere")]) == 2
    assert "No step is in these caches" in capsys.readouterr().err


def test_only_durable_steps_are_dropped_unless_forced(
    caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [str(caches / f"host-{host}") for host in range(HOSTS)]
    durable = ["--durable", str(caches / "durable")]
    assert main(["checkpoint", "drop", *places, "--all"]) == 2
    assert main(["checkpoint", "drop", *places, "--step", "1", *durable]) == 2
    assert "Step 1 is not durable; nothing was dropped" in capsys.readouterr().err
    assert main(["checkpoint", "drop", *places]) == 2
    assert main(["checkpoint", "drop", *places, "--step", "9"]) == 2
    capsys.readouterr()
    assert main(["checkpoint", "drop", *places, "--all", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["dropped"]
    assert [each["is_durable"] for each in told["steps"]] == [None, None]
    assert (caches / "host-0" / "step-1").is_dir()
    rescue(caches, [0, 1, 2, 3])
    assert main(["checkpoint", "drop", *places, "--step", "2", *durable]) == 0
    assert main(["checkpoint", "drop", *places, "--step", "1", "--force"]) == 0
    assert not [path for host in range(HOSTS) for path in (caches / f"host-{host}").glob("step-*")]
