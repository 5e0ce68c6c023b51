"""A file system that another package registers under a scheme of its own is a file system everywhere.

The back end is the example of docs/storage.md, installed by its entry point.
"""

import gzip
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.checkpoint.checkpoint_run import require_room
from penstock.bench.page_cache_eviction import evict
from penstock.bench.probe.probe_run import ProbeRequest, probe
from penstock.checkpoint.commit.checkpoints import local_path, split_path
from penstock.cluster.comm import SoloComm
from penstock.cluster.gates.gate_model import Gate, GateVerdict, PreflightRequest
from penstock.cluster.gates.preflight import run_preflight
from penstock.cluster.host_counters import find_coverage
from penstock.errors import OutOfSpace
from penstock.progress import Progress
from penstock.storage import Storage, uri
from penstock.storage.capabilities import find_local_root, uses_page_cache
from penstock.storage.protocol import read_object, write_object
from penstock.storage.uri import find_local_paths_at, has_option, open_storage
from penstock.submission.authoring.preflight import locate_checkpoints
from penstock.testing.storage_contract import StorageContract
from penstock.trace.capture.recorder import TraceRecorder
from penstock.trace.capture.traced_storage import TracedStorage
from penstock.workload.load_workload import load

PAGE = Path(__file__).parents[3] / "docs" / "storage.md"
MODULE = "pfs_storage"


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example of the page, as a package that has been installed."""
    found = re.search(r"```python\n(.*?def open_pfs.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / f"{MODULE}.py").write_text(found[1], encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    entry = EntryPoint("pfs", f"{MODULE}:open_pfs", uri.ENTRY_POINTS)
    monkeypatch.setattr(uri, "entry_points", EntryPoints([entry]).select)
    yield
    sys.modules.pop(MODULE, None)


class TestPfs(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(f"pfs://{tmp_path / 'root'}", {})


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(f"pfs://{tmp_path / 'root'}", {})


def test_its_folder_and_its_cache_are_known(tmp_path: Path, storage: Storage) -> None:
    assert find_local_root(storage) == tmp_path / "root"
    assert uses_page_cache(storage)
    assert uses_page_cache(storage)
    paths = find_local_paths_at(storage.uri, {})
    assert paths is not None
    assert paths.local_root == str(tmp_path / "root")
    assert not has_option(storage.uri, "fsync", {})


def test_its_pages_are_evicted(storage: Storage) -> None:
    write_object(storage, "a/b", [bytes(1 << 20)])
    assert evict(storage, ["a/b"], comm=SoloComm()).total_bytes == 1 << 20


def test_its_free_space_is_checked(storage: Storage) -> None:
    root = find_local_root(storage)
    require_room(root, [1], comm=SoloComm())
    with pytest.raises(Exception, match="Writing all checkpoints takes") as caught:
        require_room(root, [1 << 60], comm=SoloComm())
    assert isinstance(caught.value.__cause__, OutOfSpace)


def test_gates_look_at_its_file_system(tmp_path: Path, storage: Storage) -> None:
    request = PreflightRequest(
        environment={},
        uri=storage.uri,
        reopen=lambda: open_storage(storage.uri, {}),
        results=tmp_path / "runs",
        written_bytes=1,
    )
    result = run_preflight(request, SoloComm(), gates=(Gate.APART, Gate.SPACE, Gate.STORAGE))
    verdicts = {finding.gate: finding.verdict for finding in result.preflight.findings}
    assert verdicts == {
        Gate.APART: GateVerdict.FAIL,  # one file system here, and it was seen
        Gate.SPACE: GateVerdict.PASS,
        Gate.STORAGE: GateVerdict.PASS,
    }
    assert not (tmp_path / "root").exists()


def test_the_device_below_it_is_found_or_named(storage: Storage) -> None:
    coverage = find_coverage(storage)
    assert coverage.watched != "network"
    assert "pfs://" not in coverage.reason


def test_the_probe_measures_it_as_files_through_the_page_cache(tmp_path: Path) -> None:
    request = ProbeRequest(
        uri=f"pfs://{tmp_path / 'probed'}", size_bytes=1 << 16, streams=(1,), block_bytes=(1 << 14,)
    )
    result = probe(request, comm=SoloComm(), environment={}, options={}, progress=Progress())
    assert {measurement.mode for measurement in result.measurements} == {"buffered"}
    assert "fsync" in {measurement.op for measurement in result.measurements}
    assert not (tmp_path / "probed").exists()


def test_its_trace_names_files_by_their_paths(tmp_path: Path, storage: Storage) -> None:
    recorder = TraceRecorder(tmp_path / "trace")
    write_object(TracedStorage(storage, recorder), "a", [b"bytes"])
    recorder.close()
    (trace,) = (tmp_path / "trace").glob("*.pfw*")
    text = (gzip.open if trace.suffix == ".gz" else open)(trace, "rt").read()
    assert f"{tmp_path / 'root'}/a" in text
    assert "pfs://" not in text


def test_checkpoints_have_paths_and_parents(tmp_path: Path, storage: Storage) -> None:
    assert split_path(f"{storage.uri}/step-1") == (storage.uri, "step-1")
    assert local_path(storage, "step-1/file") == tmp_path / "root" / "step-1" / "file"


def test_a_submission_names_its_folder(tmp_path: Path, storage: Storage) -> None:
    located = locate_checkpoints(load("unet3d_h100").workload, storage.uri)
    assert located.data_path == str(tmp_path / "root")


def test_bytes_of_arrays_come_back(storage: Storage) -> None:
    content = np.arange(1 << 12, dtype=np.uint8)
    write_object(storage, "array", [content.data])
    assert bytes(read_object(storage, "array")) == content.tobytes()
