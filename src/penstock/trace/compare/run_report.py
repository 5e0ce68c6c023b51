"""The report of runs: what they did, in sentences, findings and figures, as one page or as its data.

    study -> overview, findings, rows of figures -> page, JSON

Each figure has a function that asks for its rows and makes a section of them; a figure without rows is a
sentence that gives the reason. Page and `--json` have the same rows, so they cannot disagree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.errors import StorageError
from penstock.progress import Progress
from penstock.reports.page import render_report
from penstock.reports.report import Cell, Chart, Kind, Report, Section, Series, Table, Tone
from penstock.trace import figures
from penstock.trace.compare.findings import find_all, rank_findings
from penstock.trace.compare.query_findings import RUN_RULES
from penstock.trace.compare.report import (
    TONES,
    Row,
    answer_tables,
    bandwidth_charts,
    banner_of,
    bin_charts,
    by_run,
    findings_section,
    times_of,
)
from penstock.trace.compare.run_overview import overview, say_answer
from penstock.trace.compare.trace_study import Study, TraceFinding, Weight
from penstock.trace.event_schema import name_process
from penstock.trace.figures import PlacedCalls
from penstock.trace.questions.answer import Answer, document
from penstock.units import format_bytes, format_rate, format_seconds

_FILES_SHOWN: Final = 8
_CALLS: Final = ("compute", "metadata", "read", "write")
_LOOP_PARTS: Final = ("checkpoint", "barrier", "wait", "step")
_OVERLAP_TONES: Final[tuple[Tone, ...]] = ("pale", "dark", "full")
_MISSING_BYTES: Final = "No call of these traces says how many bytes it moved."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The parts of a report, in their order on the page."""

    runs: Sequence[str]
    losses: Sequence[str]
    says: Sequence[str]
    overview: Answer
    findings: Sequence[TraceFinding]
    figures: Mapping[str, tuple[Answer, Section]]
    """The rows of each figure, and its section."""

    def document(self) -> dict[str, Any]:
        """The report as JSON: sentences, findings, and the data of all figures."""
        return {
            "runs": list(self.runs),
            "says": list(self.says),
            "losses": list(self.losses),
            "overview": document(self.overview),
            "findings": [
                {
                    "code": finding.code,
                    "weight": finding.weight.value,
                    "title": finding.title,
                    "runs": list(finding.runs),
                    "lost_us": finding.lost_us,
                    "says": list(finding.says),
                    "fix": finding.fix,
                    "evidence": document(finding.evidence),
                }
                for finding in self.findings
            ],
            "figures": {
                name: {**document(answer), "why_empty": section.why_empty}
                for name, (answer, section) in self.figures.items()
            },
        }

    def page(self) -> Report:
        """The whole page; it loads nothing and runs no script."""
        num_alarms = sum(finding.weight is Weight.ALARM for finding in self.findings)
        names = ", ".join(self.runs)
        (rows_of_runs,) = answer_tables(self.overview) or [Table([])]
        rows = [
            {"run": Cell(run, run=run), **{name: text for name, text in row.items() if name != "run"}}
            for run, row in zip(self.runs, rows_of_runs.rows, strict=False)
        ]
        sections = [
            Section(text=self.says[1:]),
            findings_section(self.findings),
            *(section for _, section in self.figures.values()),
            Section(
                name="losses", title="Losses", items=self.losses, why_empty="Nothing was lost or guessed."
            ),
        ]
        if len(self.runs) > 1:
            runs = Section(title="Runs", tables=[replace(rows_of_runs, rows=rows)], notes=self.overview.notes)
            sections.insert(1, runs)
        return Report(
            title=f"I/O of {names}" if len(self.runs) <= 3 else f"I/O of {len(self.runs)} runs",
            subtitle=(
                f"{names}; findings: {len(self.findings)}, of which {num_alarms} are about misleading numbers"
            ),
            banner=banner_of(self.findings, figure=self.says[0], since=self._find_peak()),
            runs=self.runs,
            has_contents=True,
            sections=sections,
        )

    def _find_peak(self) -> str:
        """The time at which most was moved, as a sentence."""
        rows: list[Row] = list(self.figures["bandwidth"][0].records())
        if not rows:
            return "nothing was moved"
        most = max(rows, key=lambda row: row["read_bytes"] + row["written_bytes"])
        rate = (most["read_bytes"] + most["written_bytes"]) * 1e6 / most["bucket_us"]
        of_run = f" of {most['run']}" if len(self.runs) > 1 else ""
        after = format_seconds(most["since_start_us"] / 1e6)
        return f"most was moved {after} after the start{of_run}, at {format_rate(rate)}"


def report_runs(study: Study, *, progress: Progress | None = None) -> RunReport:
    """Ask a study all that its report shows."""
    progress = progress or Progress()
    progress.begin("drawing the report", len(_FIGURES) + 3)
    placed = figures.place_calls(study.events, figures.measure_axis(study.events, study.runs))
    progress.advance(1)
    alone = [finding for rule in RUN_RULES.values() for finding in rule(study)]
    findings = rank_findings([*find_all(study), *alone])
    progress.advance(1)
    first = overview(study.events, study.runs, findings)
    progress.advance(1)
    made = {}
    for name, make in _FIGURES.items():
        answer, section = make(study, placed)
        made[name] = (answer, replace(section, name=name))
        progress.advance(1)
    return RunReport(
        runs=study.runs,
        losses=[
            line for run in study.runs for account in study.accounts.get(run, ()) for line in account.losses()
        ],
        says=say_answer(first, made["overlap"][0]),
        overview=first,
        findings=findings,
        figures=made,
    )


def write_run_report(report: RunReport, path: Path) -> None:
    """Write the page, over an earlier one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(render_report(report.page()).encode(errors="backslashreplace"))
    except OSError as error:
        raise StorageError(f"Cannot write the report: {error}", uri=str(path), errno=error.errno) from error


def _timeline(study: Study, placed: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.call_bars(placed)
    charts, has_loops = [], False
    for run, rows in by_run(study.runs, answer.records()):
        lanes: list[tuple[Any, ...]] = list(
            dict.fromkeys((row["rank"], row["host"], row["pid"], row["tid"]) for row in rows)
        )
        places = {lane: place for place, lane in enumerate(lanes)}
        series = []
        for kind in (*_CALLS, *_LOOP_PARTS):
            of_kind = [row for row in rows if row["kind"] == kind]
            if of_kind:
                x, ends = times_of(of_kind)
                y = [places[row["rank"], row["host"], row["pid"], row["tid"]] for row in of_kind]
                series.append(Series(name=kind, tone=TONES[kind], x=x, ends=ends, y=y))
                has_loops |= kind in _LOOP_PARTS
        # A lane is named by its rank, or its process; further threads of the same by their own id.
        names, last = [], None
        for rank, host, pid, tid in lanes:
            own = f"rank {rank}" if rank is not None else name_process(pid)
            names.append(f"thread {tid}" if (rank, host, pid) == last else own)
            last = (rank, host, pid)
        charts.append(
            Chart(
                kind=Kind.LANES, title=run, run=run, series=series, names=names, is_wide=True,
                x_end=placed.axis.span_us / 1e6,
                note="; ".join(
                    note.removeprefix(f"{run}: ") for note in answer.notes if note.startswith(f"{run}: ")
                ),
            )
        )  # fmt: skip
    loops = " The strip above has a line for each step, under it waits and checkpoints." if has_loops else ""
    text = (
        "Each lane is a thread, or a process. Reads and writes fill it, calls that move no data are at its "
        f"foot, computation is behind.{loops}"
    )
    return answer, Section(
        title="Calls by rank and thread",
        text=[text],
        charts=charts,
        why_empty="No event of these traces is I/O, computation or waiting.",
    )


def _rank_bytes(study: Study, placed: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.rank_cells(placed).without("busy_us")
    return answer, _rank_heat(
        study,
        placed,
        answer,
        title="Bytes by rank and time",
        value_of=lambda row: row["read_bytes"] + row["written_bytes"],
        format_full=lambda largest, width: f"{format_bytes(largest)} in {width}",
        says="the more it moved, the fuller its tone.",
        why_empty=_MISSING_BYTES,
    )


def _rank_busy(study: Study, placed: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.rank_cells(placed).without("read_bytes", "written_bytes")
    return answer, _rank_heat(
        study,
        placed,
        answer,
        title="Busy time by rank and time",
        value_of=lambda row: row["busy_us"] / (row["bucket_us"] * row["num_processes"]),
        format_full=lambda largest, width: f"busy for {largest:.0%} of {width}",
        says="the share in which at least one call was under way.",
        why_empty="No call of these traces took any time.",
    )


def _rank_heat(
    study: Study,
    placed: PlacedCalls,
    answer: Answer,
    *,
    title: str,
    value_of: Callable[[Row], float],
    format_full: Callable[[float, str], str],
    says: str,
    why_empty: str,
) -> Section:
    """A heat map of ranks: a cell has the tone of its value, and `format_full` describes the full tone."""
    width = format_seconds(placed.axis.bucket_us(figures.HEAT_BUCKETS) / 1e6)
    rows: list[Row] = list(answer.records())
    largest = max(map(value_of, rows), default=0.0)
    charts = []
    for run, of_run in by_run(study.runs, rows) if largest else ():
        # Ranks that made no call, but computed, have no row.
        series = []
        for number in dict.fromkeys(row["row"] for row in of_run):
            of_rank = [row for row in of_run if row["row"] == number]
            x, ends = times_of(of_rank)
            series.append(
                Series(name=_name_ranks(of_rank[0]), x=x, ends=ends, y=list(map(value_of, of_rank)))
            )
        charts.append(_heat(run, series, placed, largest, format_full(largest, width)))
    return Section(
        title=title,
        text=[f"Each cell is {width} of a rank: {says}"],
        charts=charts,
        notes=answer.notes,
        why_empty=why_empty,
    )


def _name_ranks(row: Row) -> str:
    if row["first_rank"] is None:
        more = f" +{row['num_processes'] - 1}" if row["num_processes"] > 1 else ""
        return f"{name_process(row['pid'])}{more}"
    first, last = row["first_rank"], row["last_rank"]
    return f"rank {first}" if first == last else f"rank {first}-{last}"


def _heat(run: str, series: Sequence[Series], placed: PlacedCalls, largest: float, full: str) -> Chart:
    return Chart(
        kind=Kind.HEAT,
        title=run,
        run=run,
        series=series,
        x_end=placed.axis.span_us / 1e6,
        y_end=largest,
        note=f"full tone: {full}",
        is_wide=len(placed.axis.runs) <= 2,
    )


def _bandwidth(study: Study, placed: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.bandwidth(study.events, placed.axis)
    width = format_seconds(placed.axis.bucket_us(figures.BANDWIDTH_BUCKETS) / 1e6)
    text = f"Bytes in each {width}, on one axis for all runs of a tier: reads rise, writes hang from zero."
    charts = bandwidth_charts(study.runs, answer.records(), placed.axis.span_us / 1e6)
    return answer, Section(title="Bandwidth over time", text=[text], charts=charts, why_empty=_MISSING_BYTES)


def _overlap(study: Study, placed: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.overlap_lanes(placed)
    without = _runs_without(study, placed, "num_compute")
    missing = (
        f"No event of {without} is computation: its name would contain `compute`; --phase names others."
        if without
        else ""
    )
    charts = []
    for run, rows in by_run(study.runs, answer.records()):
        x, ends = times_of(rows)
        parts = {
            "compute": [row["compute_us"] - row["both_us"] for row in rows],
            "both": [row["both_us"] for row in rows],
            "I/O alone": [row["io_us"] - row["both_us"] for row in rows],
        }
        whole = [row["bucket_us"] * row["num_processes"] / 100 for row in rows]
        io_us, both_us = (sum(row[column] for row in rows) for column in ("io_us", "both_us"))
        note = f"{100 * both_us / io_us:.1f} % of the I/O while its process computes" if io_us else (
            "no I/O in processes that compute"
        )  # fmt: skip
        series = [
            Series(
                name=name, tone=tone, x=x, ends=ends, y=[us / of for us, of in zip(part, whole, strict=True)]
            )
            for (name, part), tone in zip(parts.items(), _OVERLAP_TONES, strict=True)
        ]
        charts.append(
            Chart(
                kind=Kind.LAYERS, title=run, run=run, unit="%", series=series, y_end=100.0, note=note,
                x_end=placed.axis.span_us / 1e6,
            )
        )  # fmt: skip
    text = f"The share of processes that compute, do both, or only I/O. {missing}".strip()
    return answer, Section(title="Computation and I/O", text=[text], charts=charts, why_empty=missing)


def _runs_without(study: Study, placed: PlacedCalls, wanted: str) -> str:
    """The runs with none of what `wanted` counts, for a sentence; empty if there is none."""
    runs = placed.axis.runs
    missing = [run for run in study.runs if run not in runs or not getattr(runs[run], wanted)]
    return "these traces" if len(missing) == len(study.runs) else ", ".join(missing)


def _sizes(study: Study, _: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.size_bins(study.events)
    counted = (("num_calls", "calls"), ("total_bytes", "bytes"))
    text = "A bin is from its label to twice of that: how many calls, and which of them carry the bytes."
    charts = bin_charts(study.runs, answer.records(), "from_bytes", "to_bytes", counted)
    return answer, Section(title="Sizes of transfers", text=[text], charts=charts, why_empty=_MISSING_BYTES)


def _latencies(study: Study, _: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.latency_bins(study.events)
    counted = (("num_calls", "calls"), ("sum_us", "time, summed over threads"))
    text = "Bins begin at 1, 2 and 5 times powers of ten: how many calls, and which of them take the time."
    charts = bin_charts(study.runs, answer.records(), "from_us", "to_us", counted)
    return answer, Section(
        title="Durations of calls", text=[text], charts=charts, why_empty="These traces have no I/O."
    )


def _offsets(study: Study, placed: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.file_offsets(study.events, placed.axis)
    without = _runs_without(study, placed, "num_offsets")
    missing = f"No read or write of {without} says at which offset it was." if without else ""
    charts = []
    for run, rows in by_run(study.runs, answer.records()):
        for path in dict.fromkeys(row["path"] for row in rows):
            of_path = [row for row in rows if row["path"] == path]
            series = []
            for kind in ("read", "write"):
                of_kind = [row for row in of_path if row["kind"] == kind]
                if of_kind:
                    x, ends = times_of(of_kind)
                    y, tops = ([row[column] for row in of_kind] for column in ("from_bytes", "to_bytes"))
                    series.append(Series(name=kind, tone=TONES[kind], x=x, ends=ends, y=y, tops=tops))
            charts.append(
                Chart(
                    kind=Kind.SPANS, title=f"{run}: {path.rsplit('/', 1)[-1]}", run=run, unit="B", note=path,
                    series=series, x_end=placed.axis.span_us / 1e6, y_end=of_path[0]["length_bytes"],
                )
            )  # fmt: skip
    text = (
        "The files of each run with the most bytes: a rising line is sequential, a cloud is random. "
        + missing
    )
    return answer, Section(title="Offsets over time", text=[text.strip()], charts=charts, why_empty=missing)


def _files(study: Study, _: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.busiest_files(study.events)
    parts = []
    for run, rows in by_run(study.runs, answer.records()):
        measured = [{**row, "moved_bytes": row["read_bytes"] + row["written_bytes"]} for row in rows]
        for column, title, bars in (
            ("moved_bytes", "by bytes", "bytes"),
            ("union_us", "by time under way", "under way"),
        ):
            shown = sorted(measured, key=lambda row: (-row[column], row["path"]))[:_FILES_SHOWN]
            table = [
                {
                    "bytes": Cell(format_bytes(row["moved_bytes"]), value=row["moved_bytes"]),
                    "under way": Cell(format_seconds(row["union_us"] / 1e6), value=row["union_us"]),
                    "calls": f"{row['num_calls']:,}",
                    "file": row["path"],
                }
                for row in shown
            ]
            numbers = {"bytes", "under way", "calls"}
            parts.append(
                Section(title=f"{run}, {title}", run=run, tables=[Table(table, bars=bars, numbers=numbers)])
            )
    return answer, Section(
        title="Files by bytes and time",
        text=["Time under way is that in which at least one call on the file ran."],
        parts=parts,
        why_empty="No call of these traces names a file.",
    )


def _metadata(study: Study, placed: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.metadata_calls(study.events, placed.axis)
    width = format_seconds(placed.axis.bucket_us(figures.HEAT_BUCKETS) / 1e6)
    rows: list[Row] = list(answer.records())
    largest = max((row["num_calls"] for row in rows), default=0)
    totals: dict[str, int] = {}
    for row in rows:
        totals[row["op"]] = totals.get(row["op"], 0) + row["num_calls"]
    operations = sorted(totals, key=lambda op: (op == "other", -totals[op]))
    charts = []
    for run, of_run in by_run(study.runs, rows):
        series = []
        for op in operations:
            of_op = [row for row in of_run if row["op"] == op]
            x, ends = times_of(of_op)
            series.append(Series(name=op, x=x, ends=ends, y=[row["num_calls"] for row in of_op]))
        charts.append(_heat(run, series, placed, largest, f"{largest:,} calls in {width}"))
    return answer, Section(
        title="Metadata operations over time",
        text=[f"Calls that move no data. Each cell is {width}: more calls, fuller tone."],
        charts=charts,
        why_empty="These traces have no call that moves no data, as open and stat.",
    )


def _operations(study: Study, _: PlacedCalls) -> tuple[Answer, Section]:
    answer = figures.operations(study.events)
    return answer, Section(
        title="Operations",
        text=["Sums add all threads; a mean and a longest call show how a sum came about."],
        tables=[replace(table, title="") for table in answer_tables(answer)],
        why_empty="These traces have no I/O.",
    )


_FIGURES: Final[Mapping[str, Callable[[Study, PlacedCalls], tuple[Answer, Section]]]] = {
    "timeline": _timeline,
    "rank_bytes": _rank_bytes,
    "rank_busy": _rank_busy,
    "bandwidth": _bandwidth,
    "overlap": _overlap,
    "sizes": _sizes,
    "latencies": _latencies,
    "offsets": _offsets,
    "files": _files,
    "metadata": _metadata,
    "operations": _operations,
}
