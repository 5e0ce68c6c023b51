"""A study: the events of several runs in one relation, as `runs.yaml` describes them, and findings.

Tables, mismatches and findings know this and nothing of where events come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from penstock.progress import Progress, Silent
from penstock.trace.dimensions import (
    DEFAULT_PHASES,
    Dimensions,
    PhaseRule,
    check_pattern,
    parse_phase,
    sql_literal,
)
from penstock.trace.event_table import read_facts
from penstock.trace.questions.answer import Answer, Column, Unit, Value
from penstock.trace.questions.events_view import IS_IO, EventsView, view_events
from penstock.trace.reading.event_filter import EventFilter
from penstock.trace.trace_set import find_trace_files, open_trace_set
from penstock.trace.yaml_documents import YamlDocument
from penstock.units import parse_rate

if TYPE_CHECKING:
    from penstock.trace.event_schema import FileAccount


PROCESS = "host, pid"
"""A process number alone may occur on every host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Events of all runs in one relation, told apart by their column `run`."""

    events: EventsView
    accounts: Mapping[str, Sequence[FileAccount]]
    asked: ComparisonSpec

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
        return f"contains(name, {sql_literal(self.asked.app_event)})"

    def run_columns(self, unit: Unit) -> list[Column]:
        """A column for each run, called as the run is."""
        return [Column(run, unit, head=run) for run in self.runs]

    def in_order(self) -> str:
        """SQL: position of a row's run."""
        return f"list_position([{', '.join(map(sql_literal, self.runs))}], run)"


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


_IN_MEMORY_EVENTS: Final = 500_000
"""So many events are looked at with these dimensions once; of more, each question looks at what it needs."""


@contextmanager
def open_study(
    asked: ComparisonSpec, folder: Path, *, progress: Progress | None = None, dask: str = ""
) -> Iterator[Study]:
    """Open what `asked` names; globs are relative to `folder`; `dask` as in `open_traces`."""
    runs = {run: _patterns(globs, folder) for run, globs in asked.runs.items()}
    event_filter = EventFilter(where=asked.where)
    with open_trace_set(runs, progress=progress or Silent(), event_filter=event_filter, dask=dask) as traces:
        relation = traces.relation
        if sum(each.events + each.salvaged for each in traces.accounts) <= _IN_MEMORY_EVENTS:
            traces.connection.execute(f"CREATE TEMP TABLE penstock_study AS SELECT * FROM {relation}")
            relation = "penstock_study"
        events = view_events(traces.connection, relation, asked.dimensions())
        yield Study(events=events, accounts=_by_run(runs, traces.accounts), asked=asked)


def _patterns(globs: str | Sequence[str], folder: Path) -> list[str]:
    return [str(folder / each) for each in ([globs] if isinstance(globs, str) else globs)]


def _by_run(
    runs: Mapping[str, Sequence[str]], accounts: Sequence[FileAccount]
) -> dict[str, Sequence[FileAccount]]:
    """Accounts come in the order of runs, as many of each as its files and tables have."""
    parted: dict[str, Sequence[FileAccount]] = {}
    position = 0
    for run, patterns in runs.items():
        number = sum(
            1 if facts is None else len(facts.accounts)
            for facts in map(read_facts, find_trace_files(patterns))
        )
        parted[run] = accounts[position : position + number]
        position += number
    return parted


def _phase(text: str) -> str:
    parse_phase(text)
    return text


def _rate(text: str) -> str:
    parse_rate(text)
    return text


Phase = Annotated[str, AfterValidator(_phase)]
Pattern = Annotated[str, AfterValidator(check_pattern)]
Rate = Annotated[str, AfterValidator(_rate)]
Globs = str | tuple[str, ...]


class ComparisonSpec(YamlDocument):
    """Runs by name, in the order in which tables show them, and how to look at them."""

    runs: Annotated[dict[str, Globs], Field(min_length=1)]
    baseline: str = ""
    app_event: str = "heckpoint"
    tiers: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    file_classes: Literal["strip-digits"] | dict[str, Pattern] = "strip-digits"
    phases: tuple[Phase, ...] = ()
    files: tuple[str, ...] = ()
    device_rates: dict[str, Rate] = Field(default_factory=dict)
    where: str = ""

    @model_validator(mode="after")
    def _baseline_is_a_run(self) -> Self:
        if self.baseline and self.baseline not in self.runs:
            raise ValueError(f"the baseline {self.baseline!r} is none of the runs {', '.join(self.runs)}")
        for tier in self.device_rates:
            if tier not in self.tiers:
                raise ValueError(
                    f"device_rates speaks of {tier!r}; there are the tiers {', '.join(self.tiers)}"
                )
        return self

    @property
    def baseline_run(self) -> str:
        """The run that others are measured by: the first, unless another is named."""
        return self.baseline or next(iter(self.runs))

    def dimensions(self) -> Dimensions:
        """How events are seen; own rules of phases go before the default ones."""
        own: tuple[PhaseRule, ...] = tuple(map(parse_phase, self.phases))
        return Dimensions(
            tiers={name: (some,) if isinstance(some, str) else some for name, some in self.tiers.items()},
            file_classes={} if self.file_classes == "strip-digits" else self.file_classes,
            phases=(*own, *DEFAULT_PHASES),
        )

    def device_rates_bytes_per_s(self) -> Mapping[str, float]:
        """What the devices of a tier give one host at most, where the description says so."""
        return {tier: parse_rate(text) for tier, text in self.device_rates.items()}


class Weight(StrEnum):
    """How much a finding matters to whoever reads the tables."""

    ALARM = "alarm"  # numbers of this comparison mislead
    COST = "cost"  # time or bytes that could be saved
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """One thing that stands out: `says` in whole sentences with numbers, `evidence` as rows."""

    code: str
    weight: Weight
    title: str
    runs: Sequence[str]
    says: Sequence[str]
    evidence: Answer


Rule = Callable[[Study], list[TraceFinding]]


def spans(values: Iterable[Any]) -> str:
    """Numbers as spans (`8-15`), names as a short list."""
    values = sorted(values)
    if not values:
        return ""
    if not all(isinstance(value, int) for value in values):
        shown = ", ".join(map(str, values[:2]))
        return shown + (f" and {len(values) - 2:,} more" if len(values) > 2 else "")
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
