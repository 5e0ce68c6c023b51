"""The figures of a report of runs: what each shows and how to read it, or why it has nothing to show.

A figure is drawn from its answer's rows alone, so page and `--json` cannot disagree.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.reports.html_page import LONG_TEXT, Cell, Table
from penstock.reports.panels import Panel, Sheet
from penstock.trace.compare.report import lay_out
from penstock.trace.compare.trace_study import Study
from penstock.trace.figures import calls, draw_calls, draw_histograms, draw_over_time, histograms, over_time
from penstock.trace.figures.draw_histograms import Bins
from penstock.trace.figures.placed_calls import PlacedCalls
from penstock.trace.figures.time_axis import TimeAxis
from penstock.trace.questions.answer import Answer, Unit
from penstock.units import format_bytes, format_seconds

_FILES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class RunTable:
    """A table beside panels; `run` is the number of its run, whose hue its bars have."""

    title: str
    table: Table
    run: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One section of the page: panels or tables of an answer, or why there are none."""

    name: str
    title: str
    answer: Answer
    says: str
    panels: Sequence[Panel] = ()
    looks: Sequence[str] = ()
    """Tones that the panels use, for their legend."""
    is_grid: bool = False
    """Whether panels and tables stand side by side where there is room."""
    notes: Sequence[str] = ()
    tables: Sequence[RunTable] = ()
    why_empty: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What all figures are drawn from."""

    study: Study
    placed: PlacedCalls
    sheet: Sheet
    rank_cells: Answer

    @property
    def axis(self) -> TimeAxis:
        """The runs that have events, and their span."""
        return self.placed.axis

    @property
    def has_many_runs(self) -> bool:
        """Whether heat maps stand side by side."""
        return len(self.axis.runs) > 2

    def runs_without(self, wanted: str) -> str:
        """The runs with none of what `wanted` counts, for a sentence; empty if there is none."""
        missing = [
            run
            for run in self.study.runs
            if run not in self.axis.runs or not getattr(self.axis.runs[run], wanted)
        ]
        return "these traces" if len(missing) == len(self.study.runs) else ", ".join(missing)


def _timeline(drawing: Drawing) -> Figure:
    answer = calls.call_bars(drawing.placed)
    return Figure(
        name="timeline",
        title="Calls by rank and thread",
        answer=answer,
        says=(
            "Each lane is a thread, or a process. Reads and writes fill it, calls that move no data are at "
            f"its foot, computation is behind.{_LOOPS if draw_calls.has_loops(answer) else ''}"
        ),
        panels=draw_calls.draw_calls(answer, drawing.sheet),
        looks=draw_calls.looks_of(answer),
        why_empty="No event of these traces is I/O, computation or waiting.",
    )


_LOOPS: Final = " The strip above has a line for each step, under it waits and checkpoints."


def _rank_bytes(drawing: Drawing) -> Figure:
    return _rank_heat(
        drawing,
        Heat(
            name="rank_bytes",
            title="Bytes by rank and time",
            answer=drawing.rank_cells.without("busy_us"),
            value=lambda row: row["read_bytes"] + row["written_bytes"],
            full=lambda largest, width: f"{format_bytes(largest)} in {width}",
            says="the more it moved, the fuller its tone.",
            why_empty="No call of these traces says how many bytes it moved.",
        ),
    )


def _rank_busy(drawing: Drawing) -> Figure:
    return _rank_heat(
        drawing,
        Heat(
            name="rank_busy",
            title="Busy time by rank and time",
            answer=drawing.rank_cells.without("read_bytes", "written_bytes"),
            value=lambda row: row["busy_us"] / (row["bucket_us"] * row["num_processes"]),
            full=lambda largest, width: f"busy for {largest:.0%} of {width}",
            says="the share in which at least one call was under way.",
            why_empty="No call of these traces took any time.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """A heat map of ranks: the value of a cell, and what the `full` tone is, in a bucket of such a width."""

    name: str
    title: str
    answer: Answer
    value: Callable[[Mapping[str, Any]], float]
    full: Callable[[float, str], str]
    says: str
    why_empty: str


def _rank_heat(drawing: Drawing, heat: Heat) -> Figure:
    width = format_seconds(drawing.axis.bucket_us(over_time.HEAT_BUCKETS) / 1e6)
    panels = draw_over_time.draw_rank_heat(
        heat.answer, drawing.sheet, value=heat.value, text=lambda largest: heat.full(largest, width)
    )
    return Figure(
        name=heat.name,
        title=heat.title,
        answer=heat.answer,
        says=f"Each cell is {width} of a rank: {heat.says}",
        panels=panels if any(panel.shapes for panel in panels) else [],
        is_grid=drawing.has_many_runs,
        notes=heat.answer.notes,
        why_empty=heat.why_empty,
    )


def _bandwidth(drawing: Drawing) -> Figure:
    answer = over_time.bandwidth(drawing.study.events, drawing.axis)
    width = format_seconds(drawing.axis.bucket_us(over_time.BANDWIDTH_BUCKETS) / 1e6)
    return Figure(
        name="bandwidth",
        title="Bandwidth over time",
        answer=answer,
        says=(
            f"Bytes in each {width}, on one axis for all runs of a tier: reads rise from zero, writes hang "
            "from it."
        ),
        panels=draw_over_time.draw_bandwidth(answer, drawing.sheet),
        looks=("read", "write"),
        why_empty="No call of these traces says how many bytes it moved.",
    )


def _overlap(drawing: Drawing) -> Figure:
    answer = over_time.overlap_lanes(drawing.placed)
    without = drawing.runs_without("num_compute")
    advice = "its name would contain `compute`; --phase names others" if without else ""
    missing = f"No event of {without} is computation: {advice}." if without else ""
    return Figure(
        name="overlap",
        title="Computation and I/O",
        answer=answer,
        says=f"The share of processes that compute, do both, or only I/O. {missing}".strip(),
        panels=draw_over_time.draw_overlap(answer, drawing.sheet),
        looks=("compute", "both", "alone"),
        is_grid=drawing.has_many_runs,
        why_empty=missing,
    )


def _sizes(drawing: Drawing) -> Figure:
    answer = histograms.size_bins(drawing.study.events)
    return Figure(
        name="sizes",
        title="Sizes of transfers",
        answer=answer,
        says=(
            "A bin is from its label to twice of that. How many calls there are, and which of them carry the "
            "bytes."
        ),
        panels=draw_histograms.draw_bins(
            answer.records(),
            drawing.sheet,
            Bins("from_bytes", "to_bytes", Unit.BYTES),
            (("num_calls", "calls"), ("total_bytes", "bytes")),
        ),
        looks=("read", "write"),
        is_grid=True,
        why_empty="No call of these traces says how many bytes it moved.",
    )


def _latencies(drawing: Drawing) -> Figure:
    answer = histograms.latency_bins(drawing.study.events)
    return Figure(
        name="latencies",
        title="Durations of calls",
        answer=answer,
        says=(
            "Bins begin at 1, 2 and 5 times powers of ten. How many calls there are, and which of them "
            "take the time."
        ),
        panels=draw_histograms.draw_bins(
            answer.records(),
            drawing.sheet,
            Bins("from_us", "to_us", Unit.MICROSECONDS),
            (("num_calls", "calls"), ("sum_us", "time, summed over threads")),
        ),
        looks=("read", "write", "metadata"),
        is_grid=True,
        why_empty="These traces have no I/O.",
    )


def _offsets(drawing: Drawing) -> Figure:
    answer = calls.file_offsets(drawing.study.events, drawing.axis)
    without = drawing.runs_without("num_offsets")
    missing = f"No read or write of {without} says at which offset it was." if without else ""
    return Figure(
        name="offsets",
        title="Offsets over time",
        answer=answer,
        says=(
            "The files of each run with the most bytes: a rising line is sequential, a cloud is random. "
            + missing
        ).strip(),
        panels=draw_calls.draw_offsets(answer, drawing.sheet),
        looks=("read", "write"),
        is_grid=True,
        why_empty=missing,
    )


def _files(drawing: Drawing) -> Figure:
    answer = histograms.busiest_files(drawing.study.events)
    tables = [
        RunTable(f"{run}, {title}", _bar_table(rows, column), drawing.sheet.hues[run])
        for run, rows in drawing.sheet.by_run(answer.records())
        for column, title in (("moved_bytes", "by bytes"), ("union_us", "by time under way"))
    ]
    return Figure(
        name="files",
        title="Files by bytes and time",
        answer=answer,
        says="Time under way is that in which at least one call on the file ran.",
        tables=tables,
        is_grid=True,
        why_empty="No call of these traces names a file.",
    )


def _bar_table(rows: Sequence[Mapping[str, Any]], column: str) -> Table:
    """The files with the most of `column`, whose numbers have bars."""
    measured = [{**row, "moved_bytes": row["read_bytes"] + row["written_bytes"]} for row in rows]
    shown = sorted(measured, key=lambda row: (-row[column], row["path"]))[:_FILES_SHOWN]
    most = shown[0][column] or 1

    def cells(row: Mapping[str, Any]) -> Iterator[Cell]:
        for name, text in (
            ("moved_bytes", format_bytes(row["moved_bytes"])),
            ("union_us", format_seconds(row["union_us"] / 1e6)),
        ):
            is_barred = name == column
            yield Cell(
                text, "number bar" if is_barred else "number", 100 * row[name] / most if is_barred else None
            )
        yield Cell(f"{row['num_calls']:,}", "number")
        yield Cell(row["path"], "long" if len(row["path"]) > LONG_TEXT else "")

    head = (Cell("bytes", "number"), Cell("under way", "number"), Cell("calls", "number"), Cell("file"))
    return Table(head=head, rows=tuple(tuple(cells(row)) for row in shown))


def _metadata(drawing: Drawing) -> Figure:
    answer = over_time.metadata_calls(drawing.study.events, drawing.axis)
    width = format_seconds(drawing.axis.bucket_us(over_time.HEAT_BUCKETS) / 1e6)
    return Figure(
        name="metadata",
        title="Metadata operations over time",
        answer=answer,
        says=f"Calls that move no data. Each cell is {width}: more calls, fuller tone.",
        panels=draw_over_time.draw_metadata(answer, drawing.sheet),
        is_grid=drawing.has_many_runs,
        why_empty="These traces have no call that moves no data, as open and stat.",
    )


def _operations(drawing: Drawing) -> Figure:
    answer = histograms.operations(drawing.study.events)
    page_table = lay_out(answer)
    return Figure(
        name="operations",
        title="Operations",
        answer=answer,
        says="Sums add all threads; a mean and a longest call say how a sum came about.",
        tables=[RunTable("", page_table.table)] if page_table.table else [],
        why_empty="These traces have no I/O.",
    )


FIGURES: Final[Sequence[Callable[[Drawing], Figure]]] = (
    _timeline, _rank_bytes, _rank_busy, _bandwidth, _overlap, _sizes, _latencies, _offsets, _files, _metadata,
    _operations,
)  # fmt: skip
