"""The page of a comparison of runs: which is faster, by how much, and what was different about it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import name_some
from penstock.reports.report import Banner, Chart, Kind, Look, Report, Series, table_section
from penstock.results.run_comparison import RunComparison, RunSummary
from penstock.units import format_rate

GIB: Final = 2**30
_NOTICED: Final = 0.03
"""Changes below this are called alike."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure that runs are compared by, the more the better."""

    title: str
    value: Callable[[RunSummary], float | None]
    text: Callable[[float], str]
    unit: str
    y_end: float = 0.0


def _gib(value: float | None) -> float | None:
    return None if value is None else value * GIB


_FIGURES: Final = (
    _Figure("AU", lambda run: run.au_compat_percent, lambda au: f"{au:.2f} %", "%", 100),
    _Figure(
        "Samples a second",
        lambda run: run.samples_per_s_strict,
        lambda rate: f"{rate:,.1f}",
        "",
    ),
    _Figure("Bytes read", lambda run: run.read_bytes_per_s, format_rate, "B/s"),
    _Figure("Checkpoints written", lambda run: _gib(run.write_gib_per_s), format_rate, "B/s"),
    _Figure("Checkpoints read back", lambda run: _gib(run.read_gib_per_s), format_rate, "B/s"),
)


def make_comparison_page(comparison: RunComparison) -> Report:
    """The page of two or more runs, each against the first."""
    runs = comparison.runs
    return Report(
        title=f"{len(runs)} runs compared",
        subtitle=f"{', '.join(run.id for run in runs)}; against {runs[0].id}",
        banner=_banner(comparison),
        highlights=[chart for figure in _FIGURES for chart in _draw(figure, runs)],
        runs=[run.id for run in runs],
        sections=[
            table_section("obstacles", "Requested differently", _differences(comparison.obstacles, runs)),
            table_section("varied", "Set differently", _differences(comparison.varied, runs)),
            table_section("runs", "Runs", list(_run_rows(runs))),
        ],
    )


def _banner(comparison: RunComparison) -> Banner:
    first, *others = comparison.runs
    known = [figure for figure in _FIGURES if figure.value(first) is not None]
    main = next((figure for figure in known if figure.title != "AU"), None)
    changes = {run.id: _change(main, first, run) for run in others}
    verdict, look = _verdict(comparison, list(changes.values()))
    differing = [difference["key"] for difference in (*comparison.obstacles, *comparison.varied)]
    return Banner(
        verdict=verdict,
        look=look,
        figure="; ".join(_say_run(run, first, known) for run in others),
        limited_by=", ".join(f"{run.id}: {run.bottleneck or 'not known'}" for run in comparison.runs),
        since=f"what differs: {name_some(differing)}" if differing else "nothing differs in what was asked",
        to_do=(
            "Compare runs of the same workload, ranks and data set: see what was requested differently."
            if comparison.obstacles
            else "Look at each run's own page (`penstock results page RUN`) for when and where it lost time."
        ),
        troubles=[f"{run.id} is {run.outcome}: {run.why}" for run in comparison.runs if run.why],
    )


def _change(figure: _Figure | None, first: RunSummary, run: RunSummary) -> float | None:
    before, after = (figure.value(one) if figure else None for one in (first, run))
    return after / before - 1 if before and after is not None else None


def _verdict(comparison: RunComparison, changes: Sequence[float | None]) -> tuple[str, Look]:
    if not comparison.is_comparable:
        return "not comparable", Look.DOUBT
    known = [change for change in changes if change is not None]
    if not known:
        return "no figures", Look.DOUBT
    if all(abs(change) < _NOTICED for change in known):
        return "alike", Look.PLAIN
    if all(change > -_NOTICED for change in known):
        return "faster", Look.GOOD
    return ("slower", Look.BAD) if all(change < _NOTICED for change in known) else ("mixed", Look.PLAIN)


def _say_run(run: RunSummary, first: RunSummary, known: Sequence[_Figure]) -> str:
    said = []
    for figure in known:
        value, change = figure.value(run), _change(figure, first, run)
        if value is not None:
            more = "" if change is None else f" ({change:+.1%})"
            said.append(f"{figure.title} {figure.text(value)}{more}")
    return f"{run.id}: {', '.join(said) or 'no figures'}"


def _draw(figure: _Figure, runs: Sequence[RunSummary]) -> Iterator[Chart]:
    """A chart of all runs, each in its own colour; nothing where no run has the figure."""
    values = {run.id: value for run in runs if (value := figure.value(run)) is not None}
    if values:
        yield Chart(
            kind=Kind.BARS,
            title=figure.title,
            run=runs[0].id,
            unit=figure.unit,
            y_end=figure.y_end,
            series=[
                Series(name=run, run=run, x=[number], y=[value])
                for number, (run, value) in enumerate(values.items())
            ],
            note=", ".join(map(figure.text, values.values())),
        )


def _differences(
    differences: Sequence[Mapping[str, Any]], runs: Sequence[RunSummary]
) -> list[dict[str, str]]:
    return [
        {"key": one["key"], **{run.id: str(value) for run, value in zip(runs, one["values"], strict=True)}}
        for one in differences
    ]


def _run_rows(runs: Sequence[RunSummary]) -> Iterator[dict[str, str]]:
    for run in runs:
        figures = {
            figure.title: "-" if (value := figure.value(run)) is None else figure.text(value)
            for figure in _FIGURES
        }
        yield {
            "run": run.id,
            "workload": run.workload,
            "ranks": str(run.ranks or "-"),
            "outcome": run.outcome,
            **figures,
            "limited by": run.bottleneck or "-",
            "folder": run.folder,
        }
