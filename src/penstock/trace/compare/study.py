"""What a comparison looks at: the events of all runs, the accounts of their files, the order of runs.

The waist of comparison: tables, mismatches and findings know this and nothing of where events come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.trace.lens import quoted
from penstock.trace.questions.base import IS_IO, Answer, Column, Events, Unit, Value

if TYPE_CHECKING:
    from penstock.trace.compare.description import Comparison
    from penstock.trace.event import FileAccount

PROCESS = "host, pid"
"""A process number alone may occur on every host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Events of all runs in one relation, told apart by their column `run`."""

    events: Events
    accounts: Mapping[str, Sequence[FileAccount]]
    asked: Comparison

    @property
    def runs(self) -> list[str]:
        """Names, in the order asked for."""
        return list(self.asked.runs)

    @property
    def baseline(self) -> str:
        """The run that others are measured by."""
        return self.asked.baseline_run

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers, in the order asked for."""
        return list(self.asked.tiers)

    @property
    def is_app(self) -> str:
        """SQL: the application's own event that is compared."""
        return f"contains(name, {quoted(self.asked.app_event)})"

    def run_columns(self, unit: Unit) -> list[Column]:
        """A column for each run, called as the run is."""
        return [Column(run, unit, head=run) for run in self.runs]

    def in_order(self) -> str:
        """SQL: position of a row's run."""
        return f"list_position([{', '.join(map(quoted, self.runs))}], run)"


def pivot(
    study: Study, name: str, title: str, *, keys: Sequence[str], sql: str, unit: Unit,
    convert: Callable[[Any], Value] = lambda value: value, notes: Sequence[str] = (),
) -> Answer:  # fmt: skip
    """A column for each run from rows of `keys`, run, value; None where a run has no such events."""
    found: dict[tuple[Any, ...], dict[str, Value]] = {}
    for *key, run, value in study.events.ask(sql):
        found.setdefault(tuple(key), {})[run] = None if value is None else convert(value)
    rows = [
        [*key, *(values.get(run) for run in study.runs)]
        for key, values in sorted(found.items(), key=lambda pair: tuple(str(part or "") for part in pair[0]))
    ]
    columns = [*map(Column, keys), *study.run_columns(unit)]
    return Answer(name=name, title=title, columns=columns, rows=rows, notes=notes)


def longest_process_sql(by: Sequence[str], *, where: str = IS_IO, value: str = "sum(dur_us)") -> str:
    """SELECT `by` and the largest of the processes' sums."""
    keys = ", ".join(by)
    return f"""
        SELECT {keys}, max(total)::BIGINT FROM (
            SELECT {keys}, {value} AS total FROM {{events}} WHERE {where} GROUP BY {keys}, {PROCESS}
        ) GROUP BY {keys}"""
