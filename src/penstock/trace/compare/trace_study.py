"""A study: the events of several runs in one relation, as `runs.yaml` describes them, and findings.

Tables, mismatches and findings depend only on this module, not on where events come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from penstock.did_you_mean import nearest
from penstock.errors import UsageError, name_some
from penstock.progress import Progress
from penstock.storage.files.local_files import read_document
from penstock.trace.dimensions import (
    DEFAULT_PHASES,
    IS_IO,
    Dimensions,
    EventsView,
    PhaseRule,
    check_pattern,
    parse_phase,
    sql_literal,
    view_events,
)
from penstock.trace.event_schema import ALL_RANKS, FileAccount
from penstock.trace.questions.answer import Answer, Column, Unit, Value, document
from penstock.trace.trace_set import RELATION, open_trace_set, read_facts
from penstock.units import format_ranges, parse_rate
from penstock.workload.strict_yaml import parse_yaml

PROCESS = "host, pid"
"""The key of a process. The host is part of it, because hosts reuse the same PIDs."""


class Study:
    """The events of all runs in one relation, whose column `run` names the run of each event.

    Findings query `work`, the events without the I/O of the program's runtime, which has the column
    `rank_name`. `runs` and `tiers` are names, in the order of the description. `baseline` is the run with
    which the other runs are compared, `is_app` the SQL condition of the application's own event, such as its
    checkpoint.
    """

    def __init__(
        self, events: EventsView, accounts: Mapping[str, Sequence[FileAccount]], spec: ComparisonSpec
    ) -> None:
        self.events = events
        self.work = events.work()
        self.accounts = accounts
        self.spec = spec
        self.runs = list(spec.runs)
        self.baseline = spec.baseline_run
        self.tiers = list(spec.tiers)
        self.is_app = f"contains(name, {sql_literal(spec.app_event)})"

    def run_columns(self, unit: Unit) -> list[Column]:
        """Return a column for each run, with the run's name."""
        return [Column(run, unit, head=run) for run in self.runs]

    def in_order(self, column: str = "run") -> str:
        """Return an SQL expression to sort by: the position of a row's run, whose name is in `column`."""
        return f"list_position([{', '.join(map(sql_literal, self.runs))}], {column})"


def pivot(study: Study, name: str, title: str, *, keys: Sequence[str], sql: str, unit: Unit) -> Answer:
    """Turn rows of `keys`, run and value into a column for each run; None if a run has no such events."""
    cells: dict[tuple[Any, ...], dict[str, Value]] = {}
    for *key, run, value in study.events.ask(sql):
        cells.setdefault(tuple(key), {})[run] = value
    rows = [
        [*key, *(by_run.get(run) for run in study.runs)]
        for key, by_run in sorted(cells.items(), key=lambda pair: tuple(str(part or "") for part in pair[0]))
    ]
    columns = [*map(Column, keys), *study.run_columns(unit)]
    return Answer(name=name, title=title, columns=columns, rows=rows)


def longest_process_sql(by: Sequence[str], *, where: str = IS_IO) -> str:
    """Return a SELECT of `by` and the sum of durations in the process where it is largest."""
    keys = ", ".join(by)
    return f"""
        SELECT {keys}, {of_processes("max(total)")}::BIGINT FROM (
            SELECT {keys}, pid, sum(dur_us) AS total FROM {{events}} WHERE {where} GROUP BY {keys}, {PROCESS}
        ) GROUP BY {keys}"""


def of_processes(aggregate: str) -> str:
    """Return SQL for an aggregate over processes; sums over all ranks count only if there is nothing else."""
    return f"coalesce({aggregate} FILTER (pid <> {ALL_RANKS}), {aggregate})"


_IN_MEMORY_EVENTS: Final = 500_000
"""Up to this many events are classified once, in memory; with more, each question classifies what it needs.
"""


@contextmanager
def open_study(
    spec: ComparisonSpec, folder: Path, *, progress: Progress | None = None, dask: str = "", host: str = ""
) -> Iterator[Study]:
    """Open the runs of `spec`, whose globs are relative to `folder`; `dask` as in `open_trace_set`.

    With `host`, tiers apply only to files on that host.
    """
    runs = {
        run: [str(folder / glob) for glob in ([globs] if isinstance(globs, str) else globs)]
        for run, globs in spec.runs.items()
    }
    with open_trace_set(runs, progress=progress or Progress(), where=spec.where, dask=dask) as traces:
        # Somebody else may have written the description.
        traces.confine()
        num_events = sum(account.events + account.salvaged for account in traces.accounts)
        dimensions = replace(spec.dimensions(), host=host)
        is_stored = num_events <= _IN_MEMORY_EVENTS
        events = view_events(traces.connection, RELATION, dimensions, is_stored=is_stored)
        yield Study(events=events, accounts=traces.accounts_of_runs, spec=spec)


Phase = Annotated[
    PhaseRule, BeforeValidator(lambda rule: parse_phase(rule) if isinstance(rule, str) else rule)
]
"""A phase rule: a string in a document, or already parsed from the command line."""
Pattern = Annotated[str, AfterValidator(check_pattern)]
Rate = Annotated[float, BeforeValidator(lambda text: parse_rate(str(text)))]
Globs = str | tuple[str, ...]


class YamlDocument(BaseModel):
    """A section of a YAML document: immutable, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


AnyDocument = TypeVar("AnyDocument", bound=YamlDocument)


def load_document(model: type[AnyDocument], path: Path) -> AnyDocument:
    """Read and validate a YAML file."""
    try:
        text = read_document(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Cannot read {path}: {error}", fix="Check that it is a readable YAML file."
        ) from error
    return parse_document(model, text, source=str(path))


def parse_document(model: type[AnyDocument], text: str, *, source: str) -> AnyDocument:
    """Validate YAML text; `source` is its name in errors."""
    tree = parse_yaml(text, source=source, kind="A description of runs", page="trace")
    try:
        return model.model_validate(tree)
    except ValidationError as refused:
        problems = [_problem(model, error) for error in refused.errors(include_url=False)]
        raise UsageError("; ".join(problems), where=source, fix="See `penstock docs trace`.") from refused


def _problem(model: type[YamlDocument], error: Any) -> str:
    path = tuple(error["loc"])
    shown = ".".join(str(step) for step in path) or "the document"
    if error["type"] == "extra_forbidden":
        known = sorted(
            entry.alias or name
            for part in (model, *YamlDocument.__subclasses__())
            for name, entry in part.model_fields.items()
        )
        meant = nearest(str(path[-1]), known, cutoff=0.5)
        return f"unknown key {shown}" + (f": did you mean {meant}?" if meant else "")
    if error["type"] == "missing":
        return f"{shown} is missing"
    return f"{shown} is {error['input']!r:.60}: {error['msg'].removeprefix('Value error, ')}"


class QueryCheck(YamlDocument):
    """A query over `events` whose first value must be true; `name` is what reports call it."""

    name: str
    sql: str


class ComparisonSpec(YamlDocument):
    """The document `runs.yaml`: runs by name, in the order of the tables, and the dimensions that apply.

    Globs are relative to the folder of the document.
    """

    runs: Annotated[dict[str, Globs], Field(min_length=1)]
    baseline: str = ""
    app_event: str = "heckpoint"
    tiers: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    file_classes: Literal["strip-digits"] | dict[str, Pattern] = "strip-digits"
    phases: tuple[Phase, ...] = ()
    files: tuple[str, ...] = ()
    device_rates: dict[str, Rate] = Field(default_factory=dict)
    """The highest rate, in bytes per second, that one host gets from the devices of a tier."""
    where: str = ""
    checks: tuple[str | QueryCheck, ...] = ()
    """Checks for `expectations`; a comparison ignores them."""

    @model_validator(mode="after")
    def _baseline_is_a_run(self) -> Self:
        if self.baseline and self.baseline not in self.runs:
            raise ValueError(f"the baseline {self.baseline!r} is not one of the runs {', '.join(self.runs)}")
        for tier in self.device_rates:
            if tier not in self.tiers:
                raise ValueError(
                    f"device_rates has {tier!r}, which is not one of the tiers {', '.join(self.tiers)}"
                )
        return self

    @property
    def baseline_run(self) -> str:
        """The run with which the other runs are compared: the first, unless the document names one."""
        return self.baseline or next(iter(self.runs))

    def dimensions(self) -> Dimensions:
        """Return the dimensions. The document's phase rules come before the default rules."""
        return Dimensions(
            tiers={name: (some,) if isinstance(some, str) else some for name, some in self.tiers.items()},
            file_classes={} if self.file_classes == "strip-digits" else self.file_classes,
            phases=(*self.phases, *DEFAULT_PHASES),
        )


class Weight(StrEnum):
    """The importance of a finding to readers of the tables."""

    ALARM = "alarm"  # numbers of this comparison mislead
    COST = "cost"  # time or bytes that could be saved
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, slots=True)
class TraceFinding:
    """One observation: sentences with numbers (`says`), rows (`evidence`), and what to do about it (`fix`).

    `lost_us` is the wall-clock time that it costs a rank of the run: the average rank, or the worst one if
    ranks differ. It is None if unknown. Findings are ranked by it.
    """

    code: str
    weight: Weight
    title: str
    runs: Sequence[str]
    says: Sequence[str]
    evidence: Answer
    lost_us: int | None = None
    fix: str = ""
    amount: float = 0.0
    """For a habit, the number of calls that have it: a comparison counts those in excess of the baseline."""
    usual_amount: float = 0.0
    """For a habit, the number of calls in the baseline that have it."""

    def document(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        shown = {
            field.name: getattr(self, field.name) for field in fields(self) if "amount" not in field.name
        }
        lists = {"runs": list(self.runs), "says": list(self.says)}
        return {**shown, **lists, "weight": self.weight.value, "evidence": document(self.evidence)}


def format_values(values: Iterable[Any]) -> str:
    """Format numbers as ranges (`8-15`), and names as a short list."""
    values = sorted(values)
    if all(isinstance(value, int) for value in values):
        return format_ranges(values)
    return name_some(values, 2)


_NAMED: Final = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_ENDINGS: Final = re.compile(r"(\.(pfw|gz|json|txt|strace|events|parquet|darshan|zst))+$")


def name_runs(given: Sequence[str]) -> dict[str, str | tuple[str, ...]]:
    """Return the patterns of each run, by its name, in the order in which runs were first given."""
    groups: dict[tuple[str, str], list[str]] = {}
    for text in given:
        named = _NAMED.fullmatch(text)
        if named and not Path(text).exists():
            groups.setdefault(("named", named[1]), []).append(named[2])
            continue
        path = Path(text)
        is_own = not path.is_file() or read_facts(path) is not None
        groups.setdefault(("path", text) if is_own else ("folder", str(path.parent)), []).append(text)
    names = dict(
        zip(groups, _tell_apart([_propose(kind, of, groups[kind, of]) for kind, of in groups]), strict=True)
    )
    return {names[key]: tuple(patterns) for key, patterns in groups.items()}


def _propose(kind: str, of: str, patterns: Sequence[str]) -> list[str]:
    """Propose names for a run, each longer than the one before."""
    if kind == "named":
        return [of]
    if len(patterns) == 1:
        path = Path(patterns[0])
        own = re.sub(r"[*?\[\]{}]+", "", _ENDINGS.sub("", path.name)).strip("._-")
        parents = [part for part in path.absolute().parent.parts if not re.search(r"[*?\[]", part)]
    else:
        path = Path(of).absolute()
        own, parents = path.name, list(path.parent.parts)
    if not own:
        own = parents.pop() if parents else ""
    parts = [*(part.strip("/") for part in parents), own]
    parts = [part for part in parts if part] or ["run"]
    return ["/".join(parts[-depth:]) for depth in range(1, len(parts) + 1)]


def _tell_apart(proposals: Sequence[Sequence[str]]) -> Iterator[str]:
    """Choose for each run the shortest name that no other run could have, or a numbered one."""
    taken: set[str] = set()
    for number, names in enumerate(proposals):
        others = {name for other, some in enumerate(proposals) if other != number for name in some}
        name = next((name for name in names if name not in others | taken), f"{names[0]} {number + 1}")
        if len(names) == 1 and names[0] not in taken:
            name = names[0]
        taken.add(name)
        yield name
