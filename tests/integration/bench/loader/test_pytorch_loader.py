"""The pytorch loader with its workers: every way to start them, and every way in which they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.support.s3.server import BUCKET

from penstock.bench.loader.loader_protocol import BatchRequest, OpenStorage, ReadRequest
from penstock.errors import ObjectNotFound, ShortTransfer, Unavailable, UsageError
from penstock.storage import open_storage
from penstock.storage.protocol import write_object
from penstock.workload.enums import ProcessStart

pytest.importorskip("torch")

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from penstock.bench.loader.pytorch_loader import PytorchLoader, PytorchOptions, worker_context

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from tests.support.s3.server import S3Server

    from penstock.storage import Storage

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

NUM_FILES = 12
FORK = ProcessStart.FORK
SPAWN = pytest.param(ProcessStart.SPAWN, marks=pytest.mark.slow)  # each worker imports torch


@pytest.fixture(autouse=True)
def dead_workers_are_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks for them every 5 s."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Each file has a size of its own, so that a batch's bytes tell which files it read."""
    folder = tmp_path / "files"
    folder.mkdir()
    for index in range(NUM_FILES):
        (folder / f"f{index}").write_bytes(b"x" * _size_of(index))
    return folder


def _size_of(index: int) -> int:
    return 1000 + (1 << index)


def _whole(*indices: int) -> BatchRequest:
    return BatchRequest(tuple(ReadRequest(f"f{index}") for index in indices), len(indices))


def _loader(
    files: Path, workers: int, start: ProcessStart = FORK, *, prefetch_batches: int = 2
) -> PytorchLoader:
    options = PytorchOptions(
        workers=workers, sample_bytes=64, context=start, prefetch_batches=prefetch_batches, buffer_bytes=4096
    )
    return PytorchLoader(partial(open_storage, f"file://{files}", {}), options)


def _pids(loader: PytorchLoader) -> list[int]:
    return [worker.pid for worker in loader._workers if worker.pid]


def _await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def _blocks_ctrl_c(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigBlk:")[2].split()[0], 16)
    return bool(mask & (1 << (signal.SIGINT - 1)))


def _endless() -> Iterator[BatchRequest]:
    while True:
        yield _whole(0, 1)


@pytest.mark.parametrize(
    ("workers", "start"),
    [
        (0, ProcessStart.FORK),
        (1, ProcessStart.FORK),
        (4, ProcessStart.FORK),
        (4, ProcessStart.FORKSERVER),
        (2, ProcessStart.SPAWN),  # each of which imports torch
    ],
)
def test_every_epoch_reads_its_own_plan_in_order_and_leaves_no_process(
    files: Path, workers: int, start: ProcessStart
) -> None:
    loader = _loader(files, workers, start)
    pids = _pids(loader)
    assert len(pids) == workers
    assert loader.counters.read_bytes == loader.counters.requests == 0, "a start reads nothing"
    assert all(map(_blocks_ctrl_c, pids))
    assert not _blocks_ctrl_c(os.getpid())
    for epoch in range(2):
        order = [(index * 5 + epoch) % NUM_FILES for index in range(NUM_FILES)]
        pairs = list(zip(order[::2], order[1::2], strict=True))
        batches = list(loader.epoch(_whole(*pair) for pair in pairs))
        assert [batch.read_bytes for batch in batches] == [_size_of(a) + _size_of(b) for a, b in pairs]
        assert all((batch.num_samples, batch.num_reads) == (2, 2) for batch in batches)
        assert loader.counters.read_bytes == (epoch + 1) * sum(map(_size_of, range(NUM_FILES)))
        assert _pids(loader) == pids, "workers live on"
    loader.close()
    loader.close()
    _await_end(pids)


@pytest.mark.parametrize("workers", [0, 3])
def test_workers_go_on_with_another_storage_and_count_that_alone(
    workers: int, files: Path, tmp_path: Path
) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "f1").write_bytes(bytes(77))
    loader = _loader(files, workers)
    pids = _pids(loader)
    assert [batch.read_bytes for batch in loader.epoch([_whole(1), _whole(2)])] == [_size_of(1), _size_of(2)]
    loader.change_storage(partial(open_storage, f"file://{other}", {}))
    assert loader.counters.requests == 0
    assert [batch.read_bytes for batch in loader.epoch([_whole(1)] * 4)] == [77] * 4
    assert loader.counters.read_bytes == 4 * 77
    with pytest.raises(ObjectNotFound, match="other/f2"):
        list(loader.epoch([_whole(2)]))
    assert _pids(loader) == pids
    loader.close()
    _await_end(pids)


@pytest.mark.parametrize("start", [FORK, ProcessStart.FORKSERVER, SPAWN])
def test_a_second_loader_in_the_same_process_is_like_the_first(files: Path, start: ProcessStart) -> None:
    seen = []
    for _ in range(2):
        loader = _loader(files, 2 if start is not ProcessStart.SPAWN else 1, start)
        seen.append([batch.read_bytes for batch in loader.epoch([_whole(3), _whole(4, 5)])])
        pids = _pids(loader)
        loader.close()
        _await_end(pids)
    assert seen == [[_size_of(3), _size_of(4) + _size_of(5)]] * 2
    assert multiprocessing.active_children() == []


def test_two_loaders_at_once_keep_to_their_own_workers(files: Path) -> None:
    first, second = _loader(files, 2), _loader(files, 1)
    assert not set(_pids(first)) & set(_pids(second))
    ours, theirs = first.epoch([_whole(1), _whole(2)]), second.epoch([_whole(3), _whole(4)])
    bytes_of_steps = [(next(ours).read_bytes, next(theirs).read_bytes) for _ in range(2)]
    assert bytes_of_steps == [(_size_of(1), _size_of(3)), (_size_of(2), _size_of(4))]
    first.close()
    assert [batch.read_bytes for batch in second.epoch([_whole(5)])] == [_size_of(5)]
    second.close()


def test_more_is_in_hand_than_is_asked_for_by_the_prefetch_at_most(files: Path) -> None:
    asked = []

    def requests() -> Iterator[BatchRequest]:
        for request in _endless():
            asked.append(request)
            yield request

    loader = _loader(files, 2, prefetch_batches=6)
    epoch = loader.epoch(requests())
    for _ in range(10):
        next(epoch)
    loader.close()
    assert len(asked) == 10 + 6


def test_samples_arrive_in_shared_memory(files: Path) -> None:
    loader = _loader(files, 1)
    loader._requests.of_epoch = [_whole(0, 1, 2)]
    arrival = next(iter(loader._torch))
    loader.close()
    assert arrival.samples is not None
    assert tuple(arrival.samples.shape) == (3, 64)
    assert arrival.samples.is_shared()
    assert int(arrival.samples.min()) == 1


@pytest.mark.parametrize("start", [FORK, ProcessStart.FORKSERVER])
def test_a_missing_file_names_itself_at_its_batch_and_the_loader_goes_on(
    files: Path, start: ProcessStart
) -> None:
    loader = _loader(files, 2, start)
    epoch = loader.epoch([_whole(0), _whole(1), _whole(2, 99), _whole(3)])
    assert [next(epoch).read_bytes for _ in range(2)] == [_size_of(0), _size_of(1)]
    with pytest.raises(ObjectNotFound) as caught:
        next(epoch)
    assert caught.value.uri == f"file://{files}/f99"
    assert "DataLoader" not in str(caught.value)
    assert [batch.read_bytes for batch in loader.epoch([_whole(4)])] == [_size_of(4)]
    loader.close()


def test_a_file_of_another_size_is_named_with_both_sizes(files: Path) -> None:
    loader = _loader(files, 1)
    with pytest.raises(ShortTransfer, match="f5") as caught:
        list(loader.epoch([BatchRequest((ReadRequest("f5", expected_bytes=7),), 1)]))
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (7, _size_of(5))
    loader.close()


@pytest.mark.parametrize("start", [FORK, ProcessStart.FORKSERVER, SPAWN])
def test_a_killed_worker_is_an_error_that_tells_by_what(files: Path, start: ProcessStart) -> None:
    loader = _loader(files, 2 if start is not ProcessStart.SPAWN else 1, start)
    pids = _pids(loader)
    epoch = loader.epoch(_endless())
    next(epoch)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(Unavailable, match=f"process {pids[0]} by SIGKILL"):
        for _ in epoch:
            pass
    loader.close()
    _await_end(pids)


def test_no_kill_leaves_the_end_of_work_event_locked() -> None:
    context = worker_context(FORK)
    done = context.Event()
    for _ in range(8):
        child = multiprocessing.get_context("fork").Process(target=_look_forever, args=(done,))
        child.start()
        time.sleep(0.005)
        child.kill()
        child.join()
        assert not done.is_set()
    done.set()
    assert done.is_set()


def _look_forever(done: Event) -> None:
    while not done.is_set():
        pass


def test_a_worker_killed_between_epochs_is_an_error_of_the_next(files: Path) -> None:
    loader = _loader(files, 2)
    assert len(list(loader.epoch([_whole(1), _whole(2)]))) == 2
    os.kill(_pids(loader)[1], signal.SIGKILL)
    with pytest.raises(Unavailable, match="SIGKILL"):
        list(loader.epoch([_whole(1), _whole(2)]))
    loader.close()


FULL = """
import os, sys, subprocess, warnings
from functools import partial
from penstock.bench.loader.loader_protocol import BatchRequest, ReadRequest
from penstock.bench.loader.pytorch_loader import PytorchLoader, PytorchOptions
from penstock.errors import OutOfSpace
from penstock.storage import open_storage
from penstock.workload.enums import ProcessStart

subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", "/dev/shm"], check=True)
for fills in (False, True):
    if fills:
        free = os.statvfs("/dev/shm").f_bavail * 4096
        os.posix_fallocate(os.open("/dev/shm/all", os.O_CREAT | os.O_WRONLY), 0, free)
    options = PytorchOptions(workers=1, sample_bytes=1 << 20, context=ProcessStart.FORK, buffer_bytes=4096)
    try:
        loader = PytorchLoader(partial(open_storage, f"file://{sys.argv[1]}", {}), options)
        next(loader.epoch([BatchRequest((ReadRequest("f1"),), 1)]))
    except OutOfSpace as error:
        print(error)
    if not fills:
        loader.close()
"""


def test_a_full_shared_memory_is_named_by_what_did_not_fit(files: Path) -> None:
    own = ["unshare", "--mount"]
    if subprocess.run([*own, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*own, sys.executable, "-W", "ignore", "-c", FULL, str(files)],
        check=False,
        capture_output=True,
        text=True,
    )
    first, second = done.stdout.splitlines()
    assert "Shared memory is full: a batch of 1 MiB did not fit" in first
    assert "Shared memory is full: the loader's queues did not fit" in second
    assert done.stderr == ""


def _leave() -> Storage:
    os._exit(3)


def test_a_worker_that_ends_while_it_starts_is_an_error_with_its_exit_code() -> None:
    with pytest.raises(Unavailable, match="with exit code 3"):
        PytorchLoader(_leave, PytorchOptions(workers=1, sample_bytes=1, context=FORK))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("start", [FORK, ProcessStart.FORKSERVER])
def test_a_storage_that_no_worker_can_open_is_an_error_of_the_start(start: ProcessStart) -> None:
    options = PytorchOptions(workers=2, sample_bytes=1, context=start)
    with pytest.raises(UsageError, match="nothere"):
        PytorchLoader(partial(open_storage, "nothere://x", {}), options)
    assert multiprocessing.active_children() == []


def _defective() -> Storage:
    raise RuntimeError("a defect")


def test_a_defect_in_a_worker_stays_what_it_is(files: Path) -> None:
    with pytest.raises(RuntimeError, match="a defect"):
        PytorchLoader(_defective, PytorchOptions(workers=1, sample_bytes=1, context=FORK))
    assert multiprocessing.active_children() == []


def test_closing_in_the_middle_of_an_epoch_ends_all_workers(files: Path) -> None:
    loader = _loader(files, 3)
    pids = _pids(loader)
    epoch = loader.epoch(_endless())
    assert next(epoch).num_samples == 2
    loader.close()
    _await_end(pids)


def test_an_epoch_left_early_leaves_nothing_to_the_next(files: Path) -> None:
    loader = _loader(files, 2, prefetch_batches=8)
    next(loader.epoch(_endless()))
    assert [batch.read_bytes for batch in loader.epoch([_whole(7), _whole(8)])] == [_size_of(7), _size_of(8)]
    loader.close()


@pytest.mark.slow
def test_a_worker_that_hears_nothing_is_killed_by_close(files: Path) -> None:
    loader = _loader(files, 1)
    (pid,) = _pids(loader)
    os.kill(pid, signal.SIGSTOP)
    loader.close()
    _await_end([pid])


def test_a_forked_worker_lets_go_of_the_rank_s_sockets_and_handlers(files: Path) -> None:
    ours, theirs = socket.socketpair()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        loader = _loader(files, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    (worker,) = loader._workers
    ours.close()
    theirs.settimeout(10)
    assert theirs.recv(1) == b"", "an end that only the rank holds"
    theirs.close()
    assert [batch.read_bytes for batch in loader.epoch([_whole(1)])] == [_size_of(1)]
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == -signal.SIGTERM
    loader.close()


def test_the_death_of_a_worker_interrupts_nothing_else(files: Path) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    loader = _loader(files, 1)
    assert signal.getsignal(signal.SIGCHLD) is before
    (worker,) = loader._workers
    worker.kill()
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL
    loader.close()


def _objects(server: S3Server, place: str, client: str) -> OpenStorage:
    """How to open objects that this process has written with the same client, so that its threads run."""
    uri = f"s3://{BUCKET}/{place}"
    open_there = partial(open_storage, uri, server.environment, options={"client": client})
    storage = open_there()
    for index in range(3):
        write_object(storage, f"f{index}", [bytes(_size_of(index))])
    return open_there


@pytest.mark.parametrize(("start", "client"), [(ProcessStart.FORKSERVER, "obstore"), (FORK, "minio")])
def test_workers_read_objects(moto: S3Server, start: ProcessStart, client: str) -> None:
    open_there = _objects(moto, start.value, client)
    loader = PytorchLoader(open_there, PytorchOptions(workers=2, sample_bytes=1, context=start))
    for _ in range(2):
        batches = loader.epoch([_whole(0), _whole(2), _whole(1)])
        assert [batch.read_bytes for batch in batches] == [_size_of(0), _size_of(2), _size_of(1)]
    assert loader.counters.read_bytes == 2 * sum(map(_size_of, range(3)))
    loader.close()


def test_forked_workers_refuse_a_client_whose_threads_stay_in_the_rank(moto: S3Server) -> None:
    open_there = _objects(moto, "refused", "obstore")
    with pytest.raises(UsageError, match=r"obstore.*forkserver"):
        PytorchLoader(open_there, PytorchOptions(workers=1, sample_bytes=1, context=FORK))
    assert multiprocessing.active_children() == []


KILLED_RANK = """
import os, signal, sys, threading
from functools import partial
from penstock.bench.loader.pytorch_loader import PytorchLoader, PytorchOptions
from penstock.storage import open_storage
from penstock.workload.enums import ProcessStart

folder, start, delay_s = sys.argv[1:]
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
options = PytorchOptions(workers=2, sample_bytes=64, context=ProcessStart(start))
if float(delay_s):
    threading.Timer(float(delay_s), kill).start()
loader = PytorchLoader(partial(open_storage, f"file://{folder}", {}), options)
kill()
"""


@pytest.mark.parametrize(
    ("start", "delay_s"),
    [
        (FORK, "0"),
        pytest.param(ProcessStart.FORKSERVER, "0", marks=pytest.mark.slow),
        (ProcessStart.SPAWN, "0"),
        (ProcessStart.FORKSERVER, "0.3"),  # while they start
        pytest.param(ProcessStart.SPAWN, "0.3", marks=pytest.mark.slow),
    ],
)
def test_workers_of_a_killed_rank_end(files: Path, start: ProcessStart, delay_s: str) -> None:
    mark = f"{files}-{start.value}-{delay_s}"
    rank = subprocess.run(
        [sys.executable, "-c", KILLED_RANK, str(files), start.value, delay_s],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PENSTOCK_TEST_MARK": mark},
    )
    assert rank.returncode == -signal.SIGKILL
    assert "Traceback" not in rank.stderr
    # What is left holds the rank's output open, so `run` has waited for it; trackers close it as they start.
    deadline_s = time.monotonic() + 20
    while left := [process for process in psutil.process_iter() if _environ(process) == mark]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def _environ(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("PENSTOCK_TEST_MARK")
    except psutil.Error:
        return None
