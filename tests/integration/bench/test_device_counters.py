"""Runs beside their devices: past the page cache devices move every byte, out of it they move none."""

import json
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from tests.support.rank_threads import ThreadComm, on_ranks
from tests.unit.cluster.test_host_counters import host

from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.recorded_run import DeviceObserver
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cli import main
from penstock.cluster.comm import SoloComm
from penstock.cluster.host_counters import find_coverage
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.progress import Progress
from penstock.results.counter_files import (
    IoReconciliation,
    ReconciliationVerdict,
    read_counters,
    summarize_activity,
)
from penstock.results.event_files import read_events
from penstock.results.run_record import read_record
from penstock.storage import open_storage
from penstock.workload.enums import DataFormat
from penstock.workload.quantities import Duration
from penstock.workload.spec import Dataset, ReaderSection, Train, Workload

MIB = 1 << 20
BUCKET = open_storage(
    "s3://bucket", {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "z"}
)
ATTEMPTS = 6
"""A neighbour that reads at the same moment moves bytes of the same device."""

WORKLOAD = Workload(
    name="small",
    dataset=Dataset(format=DataFormat.NPZ, num_files_train=16, record_length_bytes=Fraction(4 * MIB)),
    reader=ReaderSection(batch_size=4),
    train=Train(epochs=1, computation_time=Duration(mean_s=0.001)),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 64 MiB, on a file system whose device counts."""
    folder = tmp_path_factory.mktemp("observed") / "data"
    if find_coverage(open_storage(str(folder), {})).watched != "device":
        pytest.skip(f"no device counts here: {find_coverage(open_storage(str(folder), {})).reason}")
    recipe = DatasetRecipe(dataset=WORKLOAD.dataset, seed=3, reduction=IRREDUCIBLE)
    generate(recipe, open_storage(str(folder), {}), comm=SoloComm(), threads=2, progress=Progress())
    return folder


def _train(uri: str, results: Path, epochs: int = 1) -> tuple[Path, IoReconciliation]:
    workload = replace(WORKLOAD, train=replace(WORKLOAD.train, epochs=epochs))
    request = TrainingRequest(workload=workload, results=results, seed=1, loader=NativeOptions(threads=2))
    result = train(request, open_storage(uri, {}), comm=SoloComm(), progress=Progress())
    folder = Path(result.results_dir)
    (delivery,) = read_record(folder).deliveries
    assert (delivery,) == result.stages.deliveries
    return folder, delivery


@contextmanager
def _kept_in_memory(folder: Path) -> Iterator[None]:
    """Map all files: pages that somebody has mapped cannot be dropped."""
    with ExitStack() as held:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
            file = held.enter_context(path.open("rb"))
            held.enter_context(
                mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
            )
        yield


def test_past_the_page_cache_devices_move_every_byte(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, delivery = _train(f"direct://{data}", tmp_path / "runs")
    assert delivery.application_bytes >= 64 * MIB
    assert delivery.delivered_bytes is not None
    assert delivery.delivered_bytes >= delivery.application_bytes
    assert delivery.verdict is ReconciliationVerdict.PASS
    hosts, table = read_counters(folder)
    assert [each.rank for each in hosts] == [0]
    assert any(name.endswith(".read_bytes") for name in table["counter"].to_pylist())
    assert main(["results", "show", str(folder)]) == 0
    assert "devices, read" in capsys.readouterr().out


def test_each_epoch_shows_its_own_bytes_however_short_it_is(data: Path, tmp_path: Path) -> None:
    folder, delivery = _train(f"direct://{data}", tmp_path / "runs", epochs=2)
    phases = summarize_activity(*read_counters(folder), read_events(folder))
    assert [phase["phase"] for phase in phases] == ["epoch 1", "epoch 2"]
    # Files may be read ahead of their step, but not of their epoch, and a drive counts neighbors too.
    assert all(phase["drives_read_bytes"] >= delivery.application_bytes // 2 for phase in phases)


def test_a_run_out_of_the_page_cache_is_flagged(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _kept_in_memory(data):
        for _ in range(ATTEMPTS):
            folder, delivery = _train(f"file://{data}", tmp_path / "runs")
            if delivery.verdict is ReconciliationVerdict.FAIL:
                break
    assert delivery.verdict is ReconciliationVerdict.FAIL
    assert "served from the page cache" in delivery.why
    assert json.loads((folder / "run.json").read_text())["deliveries"][0]["verdict"] == "fail"
    assert main(["results", "show", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deliveries"][0]["verdict"] == "fail"
    assert main(["results", "show", str(folder)]) == 0
    assert "FLAGGED" in capsys.readouterr().out


def _observed(comm: ThreadComm, folder: Path, roots: list[Path]) -> IoReconciliation:
    """Each host's only drive reads 8 MiB while its ranks read 1 MiB each."""
    root = roots[int(comm.host)]
    with DeviceObserver(comm, folder, BUCKET, root=root) as observer:
        comm.barrier(awaiting="all to begin")
        with observer.during("read"):
            comm.barrier(awaiting="all to read")
            if comm.rank % 2 == 0:
                text = (root / "proc/net/dev").read_text()
                (root / "new").write_text(text.replace("2000", str(2000 + 8 * MIB)))
                (root / "new").rename(root / "proc/net/dev")
            comm.barrier(awaiting="all to have read")
    return observer.deliver("read", MIB)


def test_one_rank_a_host_samples_and_all_hosts_are_added_up(tmp_path: Path) -> None:
    roots = [host(tmp_path / name) for name in "ab"]
    hosts = ["0", "0", "1", "1"]
    first, *others = on_ranks(4, lambda comm: _observed(comm, tmp_path / "run", roots), hosts=hosts)
    assert all(other == first for other in others)
    assert first.application_bytes == 4 * MIB
    assert first.by == {"0 eth0": 8 * MIB, "1 eth0": 8 * MIB}
    assert first.verdict is ReconciliationVerdict.PASS
    assert sorted(path.name for path in (tmp_path / "run/counters").iterdir()) == [
        "000000.jsonl",
        "000002.jsonl",
    ]


def test_a_host_that_cannot_count_leaves_its_run_alone_and_the_account_unchecked(tmp_path: Path) -> None:
    roots = [host(tmp_path / "a"), host(tmp_path / "b")]
    (roots[1] / "proc/stat").unlink()
    found = on_ranks(2, lambda comm: _observed(comm, tmp_path / "run", roots), hosts=["0", "1"])
    assert found[0].verdict is ReconciliationVerdict.NOT_CHECKED
    assert "1: FileNotFoundError" in found[0].why


def test_a_direction_without_a_block_moved_nothing(tmp_path: Path) -> None:
    with DeviceObserver(SoloComm(), tmp_path / "run", BUCKET, root=host(tmp_path / "a")) as observer:
        pass
    delivery = observer.deliver("write", 2 * MIB)
    assert replace(delivery, why="") == IoReconciliation(
        direction="write",
        application_bytes=2 * MIB,
        delivered_bytes=0,
        by={},
        verdict=ReconciliationVerdict.WARNING,
        why="",
    )
