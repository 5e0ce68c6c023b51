"""Tiers, classes and phases, as SQL that no text of a user can break."""

from collections.abc import Mapping
from typing import Any

import duckdb
import pytest
from tests.support.trace_events import events_table

from penstock.errors import UsageError
from penstock.trace.dimensions import (
    DEFAULT_PHASES,
    Dimensions,
    parse_mounts,
    parse_phase,
    parse_tier,
    view_events,
)


def seen(dimensions: Dimensions, *rows: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        connection.register("events", events_table([{"ts_us": at, **row} for at, row in enumerate(rows)]))
        return view_events(connection, "events", dimensions).ask(
            "SELECT tier, file_class, phase FROM {events} ORDER BY ts_us"
        )


def test_the_longest_prefix_of_whole_names_is_the_tier() -> None:
    dimensions = Dimensions(tiers={"pfs": ["/p", "/q/"], "fast": ["/p/fast"]})
    paths = ["/p/x", "/p/fast/x", "/p/faster/x", "/q/x", "/q", "/elsewhere", None]
    tiers = [row[0] for row in seen(dimensions, *({"path": path} for path in paths))]
    assert tiers == ["pfs", "fast", "pfs", "pfs", "pfs", "other", None]


def test_the_root_is_a_tier_below_all_others() -> None:
    dimensions = Dimensions(tiers={"root": ["/"], "data": ["/data"]})
    assert [row[0] for row in seen(dimensions, {"path": "/etc/x"}, {"path": "/data/x"})] == ["root", "data"]


def test_mount_points_of_one_host_say_nothing_of_files_of_others() -> None:
    dimensions = Dimensions(tiers={"/": ["/"]}, host="here")
    rows: list[dict[str, Any]] = [
        {"host": "here"},
        {"host": "node7"},
        {"host": None},
        {"host": None, "args": '{"is_sum":true}'},
    ]
    tiers = [row[0] for row in seen(dimensions, *({"path": "/p/x", **row} for row in rows))]
    assert tiers == ["/", "other", "/", "other"]


def test_a_class_is_the_name_without_digits_unless_an_own_pattern_matches() -> None:
    dimensions = Dimensions(file_classes={"weights": r"^(layer|model)-"})
    paths = ["/d/layer-0-1-600-0.pt", "/d/optimizer-1-400-1.pt", "/d/filemap_3", "/d/2024/x"]
    assert [row[1] for row in seen(dimensions, *({"path": path} for path in paths))] == [
        "weights", "optimizer.pt", "filemap_", "x",
    ]  # fmt: skip


def test_default_phases_take_the_first_rule_that_holds() -> None:
    found = seen(
        Dimensions(),
        {"name": "TorchFramework.compute", "cat": "ai_framework"},
        {"name": "write", "cat": "POSIX"},
        {"name": "fread", "cat": "STDIO"},
        {"name": "NPZReader.open", "cat": "reader"},
        {"name": "train", "cat": "app"},
    )
    assert [row[2] for row in found] == ["compute", "io", "io", "app_io", "other"]


def test_spans_of_a_loop_are_waiting_computing_or_the_whole_and_never_io() -> None:
    cats = ("wait", "barrier", "stall", "compute", "step", "epoch", "run", "checkpoint")
    found = seen(Dimensions(), *({"name": "train.x", "cat": cat} for cat in cats))
    phases = ["wait", "barrier", "stall", "compute", "loop", "loop", "loop", "app_io"]
    assert [row[2] for row in found] == phases


def test_calls_that_make_or_await_a_process_are_no_io() -> None:
    found = seen(Dimensions(), *({"name": name} for name in ("fork", "waitpid", "execve", "close")))
    assert [row[2] for row in found] == ["process", "process", "process", "io"]


def test_own_rules_look_at_name_cat_and_args() -> None:
    dimensions = Dimensions(phases=[parse_phase("flush=args.kind=drain,cat=POSIX"), *DEFAULT_PHASES])
    found = seen(dimensions, {"args": '{"kind": "drain"}'}, {"args": '{"kind": "it\'s"}'}, {"args": "{}"})
    assert [row[2] for row in found] == ["flush", "io", "io"]


def test_a_python_predicate_goes_before_the_rules() -> None:
    dimensions = Dimensions(
        phase_of=lambda name, _cat, args: "big" if args.get("n", 0) > 5 and name == "read" else None
    )
    found = seen(
        dimensions, {"args": '{"n": 9}'}, {"args": '{"n": 1}'}, {"name": "write", "args": '{"n": 9}'}
    )
    assert [row[2] for row in found] == ["big", "io", "io"]


def test_quotes_in_paths_and_rules_stay_text() -> None:
    dimensions = Dimensions(tiers={"it's": ["/o'brien"]}, phases=[parse_phase("a'b=name~x'y")])
    assert seen(dimensions, {"path": "/o'brien/f", "name": "x'y"}) == [("it's", "f", "a'b")]


@pytest.mark.parametrize("text", ["", "flush", "flush=", "=name~x", "flush=size>3"])
def test_a_rule_that_means_nothing_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"name~"):
        parse_phase(text)


def test_tiers_on_the_command_line_are_a_name_and_an_absolute_path() -> None:
    assert parse_tier("ssd=/l/ssd") == ("ssd", "/l/ssd")
    with pytest.raises(UsageError, match="--tier"):
        parse_tier("ssd=relative")


def test_mount_points_are_tiers() -> None:
    mounts = "proc /proc proc rw 0 0\n/dev/sda1 / ext4 rw 0 0\nlustre /p/lustre2 lustre rw 0 0\n"
    assert parse_mounts(mounts) == {"/": ["/"], "/p/lustre2": ["/p/lustre2"]}
