"""Whatever lies in a folder: it is read, or refused by its path with an error of ours. Nothing else."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.command_line import run_command
from tests.support.recorded_runs import CheckpointStory, TrainingStory, record_checkpoints, record_training

from penstock.cluster.host_counters import CounterSample
from penstock.errors import StorageError
from penstock.reports.page import is_page
from penstock.results.checkpoint_files import THROUGHPUT_FILE, read_throughput
from penstock.results.counter_files import (
    COUNTERS_FILE,
    CounterSpool,
    SampledHost,
    gather_counters,
    read_counters,
)
from penstock.results.event_files import SPANS_FILE, STEPS_FILE, read_events, read_spool
from penstock.results.history import read_catalog
from penstock.results.run_comparison import compare_runs, summarize_run
from penstock.results.run_record import read_record

KEYS = st.sampled_from(
    [
        "start", "end", "epochs", "num_accelerators", "num_hosts", "metric", "num_files_train",
        "host_memory_GB", "train_au_percentage", "train_au_mean_percentage", "train_au_meet_expectation",
        "1", "2", "duration", "workload", "model", "name", "format", "id",
    ]
)  # fmt: skip
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.just("success"),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
LENIENT = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(TREES, TREES, TREES)
@LENIENT
def test_any_summary_of_dlio_is_read_or_refused(
    tmp_path: Path, summary: object, stats: object, config: object
) -> None:
    (tmp_path / "configs").mkdir(exist_ok=True)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "per_epoch_stats.json").write_text(json.dumps(stats))
    (tmp_path / "configs" / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "configs" / "overrides.yaml").write_text(yaml.safe_dump(stats))
    if not isinstance(summary, dict):
        with pytest.raises(StorageError, match=re.escape(str(tmp_path))):
            summarize_run(tmp_path)
        return
    view = summarize_run(tmp_path)
    assert isinstance(view.workload, str)
    json.dumps(view.au_compat_percent, allow_nan=False)
    assert compare_runs([view, view]).deltas


@given(TREES)
@LENIENT
def test_any_run_json_is_read_or_refused(tmp_path: Path, document: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps(document))
    (run,), _ = read_catalog(tmp_path)
    assert run.outcome == "unreadable"
    assert str(tmp_path) in run.why


@given(st.binary(max_size=200))
@LENIENT
def test_any_bytes_are_refused_as_a_record_and_as_a_spool(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    (tmp_path / "0.events").write_bytes(content)
    with pytest.raises(StorageError, match=re.escape(str(tmp_path))):
        read_record(tmp_path)
    with pytest.raises(StorageError, match=re.escape(str(tmp_path))):
        read_spool(tmp_path / "0.events")


@pytest.mark.parametrize("version", [[], {}, None, 1.5, "3"])
def test_format_that_is_not_a_number_is_refused(tmp_path: Path, version: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": version}))
    with pytest.raises(StorageError, match="This run has format"):
        read_record(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "-1e999"])
def test_a_number_that_json_lacks_is_refused(tmp_path: Path, number: str) -> None:
    path = record_training(tmp_path, TrainingStory()) / "run.json"
    text, count = re.subn(r'("batch_size": )\d+', rf"\g<1>{number}", path.read_text())
    assert count
    path.write_text(text)
    with pytest.raises(StorageError, match=f"{number} is not a number in JSON"):
        read_record(path.parent)


MADE: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}
READERS: dict[str, Callable[[Path], object]] = {
    COUNTERS_FILE: read_counters,
    STEPS_FILE: read_events,
    SPANS_FILE: read_events,
    "counters/000000.jsonl": read_counters,
    "spool/000000.events": read_events,
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused(tmp_path: Path, name: str, made: str) -> None:
    run = record_training(tmp_path, TrainingStory())
    if "/" in name:
        for table in run.glob("*.parquet"):
            table.unlink()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    MADE[made](run / name)
    with pytest.raises(StorageError, match=f"a device, a pipe or a socket.*{re.escape(name)}"):
        READERS[name](run)
    (run / "report.html").unlink(missing_ok=True)
    MADE[made](run / "report.html")
    assert not is_page(run / "report.html")
    assert run_command("results", "show", run).returncode in (0, 1)
    assert run_command("results", "page", run).returncode in (1, 2)


def record_tables(folder: Path, name: str) -> Path:
    """Record a run that has the table `name`."""
    if name == THROUGHPUT_FILE:
        return record_checkpoints(folder, CheckpointStory())
    if name == STEPS_FILE:
        return record_training(folder, TrainingStory())
    host = SampledHost(host="a", rank=0, boot_id="", drives=[], interval_s=1.0, wall_ns=5, monotonic_ns=7)
    with CounterSpool(folder, host) as spool:
        spool.append(CounterSample(monotonic_ns=1, values={"cpu.user_ms": 2}))
    gather_counters(folder)
    return folder


def repeat_rows(path: Path, num_rows: int) -> None:
    """Replace a table by one of the same columns and header, whose rows are all alike and cost no bytes."""
    schema = pq.ParquetFile(path).schema_arrow
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array(["train"]))
        if pa.types.is_dictionary(kind)
        else pa.array(np.zeros(num_rows, kind.to_pandas_dtype()), kind)
        for kind in schema.types
    ]
    pq.write_table(pa.table(columns, schema=schema), path, compression="zstd", row_group_size=num_rows)


@pytest.mark.parametrize(
    ("name", "read"),
    [(COUNTERS_FILE, read_counters), (STEPS_FILE, read_events), (THROUGHPUT_FILE, read_throughput)],
)
def test_a_small_table_of_very_many_rows_is_refused(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    run = record_tables(tmp_path, name)
    repeat_rows(run / name, 4_000_000)
    with pytest.raises(StorageError, match="too many rows for the file's size: 4,000,000"):
        read(run)


def test_a_table_with_texts_of_any_length_is_refused(tmp_path: Path) -> None:
    run = record_tables(tmp_path, COUNTERS_FILE)
    schema = pq.ParquetFile(run / COUNTERS_FILE).schema_arrow
    columns = {"host": ["x" * 10_000] * 10}
    pq.write_table(pa.table(columns).replace_schema_metadata(schema.metadata), run / COUNTERS_FILE)
    with pytest.raises(StorageError, match="width"):
        read_counters(run)


@pytest.mark.parametrize("header", ["[]", "[1]", "null", "7", '"text"'])
def test_a_header_that_is_no_mapping_is_refused(tmp_path: Path, header: str) -> None:
    run = record_tables(tmp_path, STEPS_FILE)
    table = pq.read_table(run / STEPS_FILE)
    pq.write_table(table.replace_schema_metadata({"penstock": header}), run / STEPS_FILE)
    with pytest.raises(StorageError):
        read_events(run)
