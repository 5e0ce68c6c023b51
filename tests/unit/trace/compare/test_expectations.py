"""Checks pass or fail with the figures that they used, and invalid ones are refused."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.support.trace_studies import small_study

from penstock.errors import UsageError
from penstock.trace.compare import expectations
from penstock.trace.compare.expectations import CheckResult, Expectations, check_all
from penstock.trace.compare.trace_study import ComparisonSpec, open_study
from penstock.trace.event_schema import FileAccount
from penstock.trace.trace_set import bound_query

ROWS: list[dict[str, Any]] = [
    {"run": "base", "name": "write", "path": "/fast/x", "size_bytes": 100, "dur_us": 50, "rank": 0},
    {"run": "new", "name": "write", "path": "/fast/x", "size_bytes": 100, "dur_us": 70, "rank": 0},
    {"run": "new", "name": "X.checkpoint", "cat": "checkpoint", "dur_us": 90, "rank": 0},
]
EVENT = '{"id":1,"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":1700000000000000,"dur":1,"ph":"X"}\n'


Check = Callable[..., list[CheckResult]]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """Check expectations against one study: checks only read it, and its figures, which take a second."""
    accounts = {"new": [FileAccount(file="t", lines=4, events=2, dropped=2, ranks={0})]}
    with small_study(ROWS, accounts=accounts) as study, pytest.MonkeyPatch.context() as patch:
        figures = expectations._collect_figures(study)
        patch.setattr(expectations, "_collect_figures", lambda _: figures)

        def check_expectations(*checks: Any) -> list[CheckResult]:
            runs = {"base": "a", "new": "b"}
            return check_all(study, Expectations.model_validate({"runs": runs, "checks": checks}))

        yield check_expectations


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("new.fast.max_union_us <= 1.1 * base.fast.max_union_us", False),
        ("new.fast.max_union_us <= 1.5 * base.fast.max_union_us", True),
        ("new.num_dropped == 0", False),
        ("0 < new.fast.total_bytes == base.fast.total_bytes", True),
        ("new.app.max_sum_us - 40 >= (base.fast.max_sum_us + 50) / 2", True),
        ("base.app.max_sum_us == 0", True),
        ("new.slow.total_bytes != 0", False),
        ('new["fast"].max_sum_us > -1', True),
        ("findings.F1 == 0", True),
    ],
)
def test_a_comparison_of_figures_holds_or_not(check: Check, text: str, *, holds: bool) -> None:
    assert check(text)[0]["holds"] is holds


def test_a_failing_check_shows_the_figures_it_saw(check: Check) -> None:
    assert check("new.fast.max_union_us < base.fast.max_union_us")[0]["seen"] == (
        "new.fast.max_union_us = 70, base.fast.max_union_us = 50"
    )


def test_a_query_must_say_true(check: Check) -> None:
    good = {"name": "large writes", "sql": "SELECT min(size_bytes) >= 100 FROM events WHERE op = 'write'"}
    bad = {"name": "no rows", "sql": "SELECT true FROM events WHERE false"}
    nested = {
        "name": "by tier",
        "sql": "WITH t AS (SELECT tier FROM events) SELECT count(*) = 2 FROM t WHERE tier = 'fast';",
    }
    assert check(nested)[0]["holds"]
    with pytest.raises(UsageError, match="nonsense"):
        check({"name": "wrong", "sql": "SELECT nonsense FROM events"})
    assert [(each["check"], each["holds"]) for each in check(good, bad)] == [
        ("large writes", True),
        ("no rows", False),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("new.fast.max_union_us", "has no comparison operator"),
        ("new.fast <", "is not a comparison"),
        ("nwe.fast.max_sum_us < 3", "names 'nwe'; known: base, new, findings"),
        ("new.fast.speed < 3", "names 'new.fast.speed'; known:"),
        ("new.fast < 3", "needs one of"),
        ("new.fast.max_sum_us.x < 3", "nothing below it"),
        ("__import__('os') == 0", "uses"),
        ("new.fast.max_sum_us is 3", "other than"),
        ("'a' < 3", "uses"),
        ("1 / 0 < 2", "has no value: "),
        ("1 / findings.F1 < 2", "has no value: "),
        (f"{'9' * 400} * 2 < 2", "has no value: "),
        ("-" * 3000 + "1 < 2", "is nested too deeply"),
        ("-" * 99_999 + "1 < 2", "is nested too deeply"),
    ],
)
def test_a_check_that_means_nothing_is_refused(check: Check, text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check(text)
    assert said in str(refused.value)
    assert "Example:" in str(refused.value)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT true) ; COPY (SELECT 'x') TO '{file}' ; SELECT * FROM (SELECT true",
        "SELECT true; SELECT true",
        "COPY (SELECT true) TO '{file}'",
        "SELECT content FROM read_text('/etc/hostname')",
        "SELECT true FROM enable_logging('FileSystem', storage='file', storage_path='{file}')",
    ],
)
def test_a_query_of_a_description_reads_events_and_writes_nothing(tmp_path: Path, sql: str) -> None:
    (tmp_path / "t.pfw").write_text(EVENT)
    written = tmp_path / "written"
    spec = {"runs": {"a": "t.pfw"}, "checks": [{"name": "x", "sql": sql.format(file=written)}]}
    expectations = Expectations.model_validate(spec)
    with open_study(expectations, tmp_path) as study, pytest.raises(UsageError):
        check_all(study, expectations)
    assert not written.exists()
    selected = ComparisonSpec.model_validate(
        {"runs": {"a": "t.pfw"}, "where": f"({sql.format(file=written)})"}
    )
    with pytest.raises(UsageError), open_study(selected, tmp_path):
        pass
    assert not written.exists()


@pytest.mark.parametrize(
    "bomb", ["length(repeat('x', 4000000000)) > 0", "len(range(3000000000 + pid % 2)) > 0"]
)
def test_sql_of_a_description_that_takes_much_memory_is_refused(
    check: Check, tmp_path: Path, bomb: str
) -> None:
    (tmp_path / "t.pfw").write_text(EVENT)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(UsageError, match=r"It takes more than 4 GiB of memory .*the check x"):
        check({"name": "x", "sql": f"SELECT {bomb} FROM events"})
    selected = ComparisonSpec.model_validate({"runs": {"a": "t.pfw"}, "where": bomb})
    refused = pytest.raises(UsageError, match=r"It takes more than 4 GiB of memory .*--where")
    with refused, open_study(selected, tmp_path):
        pass
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 1 << 20


def test_sql_that_takes_long_is_interrupted() -> None:
    with duckdb.connect() as connection:
        with pytest.raises(UsageError, match="It takes"), bound_query(connection, "", "here", "", 0.3):
            connection.execute("SELECT count(*) FROM range(1000000000000)")
        assert connection.execute("SELECT 1").fetchall() == [(1,)]


def test_only_the_first_value_of_a_query_is_fetched_and_shown_in_short(check: Check) -> None:
    assert check({"name": "x", "sql": "SELECT true FROM range(100000000)"})[0]["holds"]
    (shown,) = check({"name": "x", "sql": "SELECT repeat('x', 100000)"})
    assert len(shown["seen"]) < 300
