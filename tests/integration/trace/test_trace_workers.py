from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from tests.support.trace_files import Writing, write_trace

from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.trace import load
from penstock.trace.reading.trace_files import find_trace_files
from penstock.trace.trace_set import convert, name_trace_files, read_facts

distributed = pytest.importorskip("distributed")


def compare(folder: Path, scheduler: str) -> None:
    for rank in range(3):
        write_trace(folder, Writing(events=300, rank=rank, generation=rank + 1))
    query, where = "SELECT * FROM events ORDER BY ALL", "op != 'close'"
    with load(folder, where=where) as alone, load(folder, where=where, dask=scheduler) as many:
        assert many.sql(query).fetchall() == alone.sql(query).fetchall()
        assert [each.document() for each in many.accounts] == [each.document() for each in alone.accounts]


def test_workers_of_a_scheduler_give_the_same_answers(tmp_path: Path) -> None:
    with distributed.LocalCluster(processes=False, n_workers=1, dashboard_address="127.0.0.1:0") as cluster:
        compare(tmp_path, cluster.scheduler_address)


def test_workers_make_the_table_that_threads_make(tmp_path: Path) -> None:
    for rank in range(3):
        write_trace(tmp_path, Writing(events=300, rank=rank, generation=rank + 1))
    files = name_trace_files(find_trace_files([str(tmp_path)]), run="base")
    alone, many = tmp_path / "alone.events", tmp_path / "many.events"
    convert(files, alone, progress=Progress())
    with distributed.LocalCluster(processes=False, n_workers=1, dashboard_address="127.0.0.1:0") as cluster:
        facts = convert(files, many, progress=Progress(), dask=cluster.scheduler_address)
    assert pq.read_table(alone).equals(pq.read_table(many))
    assert facts == read_facts(many) == read_facts(alone)


class Listeners(Progress):
    """Notes the ports that this process and its children listen on while files are read."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self._ports()
        self.found: set[object] = set()

    @staticmethod
    def _ports() -> set[object]:
        process = psutil.Process()
        return {
            each.laddr
            for one in (process, *process.children(recursive=True))
            for each in one.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }

    def advance(self, amount: float) -> None:
        super().advance(amount)
        # Servers of other tests listen in this process and its children.
        self.found |= self._ports() - self.before


def test_processes_of_this_machine_give_the_same_answers_and_listen_to_nobody(tmp_path: Path) -> None:
    write_trace(tmp_path, Writing(events=300))
    query, listeners = "SELECT * FROM events ORDER BY ALL", Listeners()
    with load(tmp_path) as alone, load(tmp_path, dask="local", progress=listeners) as many:
        assert many.sql(query).fetchall() == alone.sql(query).fetchall()
    assert listeners.found == set()


def test_events_come_as_a_dask_frame(tmp_path: Path) -> None:
    write_trace(tmp_path, Writing(events=300))
    with load(tmp_path, where="op = 'read'") as run:
        frame = run.events.dask(rows_per_partition=50)
        assert frame.npartitions > 1
        assert int(frame["size_bytes"].sum().compute()) == sum(run.events.arrow()["size_bytes"].to_pylist())


def test_a_scheduler_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    write_trace(tmp_path, Writing(events=3))
    with pytest.raises(UsageError, match="scheduler"):
        load(tmp_path, dask="nonsense")
