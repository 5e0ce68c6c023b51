import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.comm_contract import check_absence, check_comm
from tests.support.flush_daemons import wait_until
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.cluster.comm import SoloComm

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[3]
"""From here `-m tests...` can be imported."""
CONTRACT = ("-m", "tests.support.comm_contract")
ABSENCE = ("-m", "tests.integration.cluster.programs.absence")


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)


def mpiexec(ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    return run(str(BIN / "mpiexec"), "-n", str(ranks), sys.executable, *program)


def torchrun(ranks: int, *program: str) -> subprocess.CompletedProcess[str]:
    return run(str(BIN / "torchrun"), f"--nproc-per-node={ranks}", *program)


def test_a_job_of_one_keeps_every_promise() -> None:
    comm = SoloComm("here")
    check_comm(comm)
    comm.close()
    assert (comm.rank, comm.size, comm.host) == (0, 1, "here")


@pytest.mark.parametrize("ranks", [1, 4])
def test_mpi_keeps_every_promise(ranks: int) -> None:
    ended = mpiexec(ranks, *CONTRACT)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_torch_keeps_every_promise_under_torchrun() -> None:
    ended = torchrun(2, *CONTRACT)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("ranks", [1, 4])
def test_torch_keeps_every_promise_on_any_number_of_ranks(ranks: int) -> None:
    on_gloo_ranks(ranks, keep_every_promise)


def keep_every_promise(_rank: int) -> None:
    from penstock.cluster.torch_comm import TorchComm

    comm = TorchComm("here")
    check_comm(comm)
    comm.close()


def test_a_rank_missing_under_mpi_is_noticed_by_all_others(tmp_path: Path) -> None:
    # The exit code says nothing: a launcher may kill those that leave last.
    ended = mpiexec(3, *ABSENCE, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"], ended.stderr


def test_a_rank_missing_under_torch_is_noticed_by_all_others(tmp_path: Path) -> None:
    assert on_gloo_ranks(2, notice_absence, tmp_path) == [True, True]


def notice_absence(rank: int, folder: Path) -> bool:
    from penstock.cluster.torch_comm import TorchComm

    comm = TorchComm("here")
    comm.barrier(awaiting="all ranks to start", timeout_s=60.0)
    check_absence(comm)
    (folder / str(rank)).touch()
    # The ranks are out of step: none leaves before all have noticed.
    wait_until(lambda: len(list(folder.iterdir())) == comm.size, "all ranks have noticed")
    return True


def test_a_group_that_a_trainer_made_carries_and_stays_the_trainers(tmp_path: Path) -> None:
    import torch.distributed as dist

    from penstock.cluster.torch_comm import TorchComm

    store: Any = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined] # torch's stubs lack it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for comm in (TorchComm("here"), TorchComm("here", dist.new_group([0], backend="gloo"))):
            check_comm(comm)
            comm.close()
            assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_torch_without_a_process_group_is_a_usage_error() -> None:
    from penstock.cluster.torch_comm import TorchComm
    from penstock.errors import UsageError

    with pytest.raises(UsageError, match="not initialized"):
        TorchComm("here")


def test_a_launcher_of_another_mpi_than_the_library_is_detected() -> None:
    ended = run(sys.executable, "-c", "from penstock.cluster.mpi_comm import join_mpi; join_mpi('here', 4)")
    assert ended.returncode == 1
    assert "The launcher started 4 ranks, but MPI sees 1" in ended.stderr
    assert "--mpi=pmi2" in ended.stderr
