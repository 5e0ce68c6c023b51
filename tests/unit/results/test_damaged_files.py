"""Whatever lies in a folder: it is read, or refused by its path with an error of ours. Nothing else."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import StorageError
from penstock.results.event_files import read_spool
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
