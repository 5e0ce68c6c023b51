"""The report of runs: what they did, in sentences, findings and figures, as one page or as its data.

    study -> overview, findings, rows of figures -> page, JSON

Each figure has a function that queries its rows and makes a section of them; in place of a figure without
rows, a sentence gives the reason. Page and `--json` have the same rows, so they cannot disagree. Invariant: a
number that a finding of the same report calls misleading is left out, with the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.progress import Progress
from penstock.reports.page import render_report
from penstock.reports.report import Cell, Chart, Kind, Report, Section, Series, Table, Tone
from penstock.results.published_files import write_text
from penstock.trace import figures
from penstock.trace.compare.findings import find_in_runs, say_left_out
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
from penstock.trace.compare.trace_study import Study, TraceFinding, Weight
from penstock.trace.dimensions import (
    IS_CALL,
    IS_IO,
    IS_READ,
    IS_WRITE,
    NUM_CALLS,
    EventsView,
    argument_sql,
)
from penstock.trace.event_schema import ALL_RANKS
from penstock.trace.figures import TimeAxis
from penstock.trace.questions.answer import Answer, Column, Unit, document, make_columns
from penstock.trace.questions.breakdowns import find_untraced, measure_groups
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
    """The rows of each figure, and the section that shows them."""

    def document(self) -> dict[str, Any]:
        """Return the report as JSON: sentences, findings, and the data of all figures."""
        return {
            "runs": list(self.runs),
            "says": list(self.says),
            "losses": list(self.losses),
            "overview": document(self.overview),
            "findings": [finding.document() for finding in self.findings],
            "figures": {
                name: {**document(answer), "why_empty": section.why_empty}
                for name, (answer, section) in self.figures.items()
            },
        }

    def page(self) -> Report:
        """Return the whole page; it loads nothing and runs no script."""
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
            banner=banner_of(
                self.findings,
                figure=self.says[0],
                since=self._find_peak(),
                has_calls=any(
                    not row["num_calls"] or row["longest_call_us"] is not None
                    for row in self.overview.records()
                ),
            ),
            runs=self.runs,
            has_contents=True,
            sections=sections,
        )

    def _find_peak(self) -> str:
        """Return the time at which most bytes were transferred, as a sentence."""
        rows: list[Row] = list(self.figures["bandwidth"][0].records())
        if not rows:
            return "nothing was moved"
        most = max(rows, key=lambda row: row["read_bytes"] + row["written_bytes"])
        rate = (most["read_bytes"] + most["written_bytes"]) * 1e6 / most["bucket_us"]
        of_run = f" of {most['run']}" if len(self.runs) > 1 else ""
        after = format_seconds(most["since_start_us"] / 1e6)
        return f"most was moved {after} after the start{of_run}, at {format_rate(rate)}"


def report_runs(study: Study, *, progress: Progress | None = None) -> RunReport:
    """Make a report of the runs of a study."""
    progress = progress or Progress()
    progress.begin("drawing the report", len(_FIGURES) + 3)
    axis = figures.measure_axis(study.events, study.runs)
    figures.place_calls(axis)
    progress.advance(1)
    findings = find_in_runs(study)
    progress.advance(1)
    first = overview(study.events, study.runs, findings)
    progress.advance(1)
    made = {}
    for name, make in _FIGURES.items():
        answer, section = make(study, axis)
        made[name] = (answer, replace(section, name=name))
        progress.advance(1)
    return RunReport(
        runs=study.runs,
        losses=[
            *find_untraced(study.events),
            *(line for run in study.runs for one in study.accounts.get(run, ()) for line in one.losses()),
        ],
        says=[*say_answer(first, made["overlap"][0]), *say_left_out(study)],
        overview=first,
        findings=findings,
        figures=made,
    )


def write_run_report(report: RunReport, path: Path) -> None:
    """Write the page, replacing an earlier one."""
    write_text(path.parent, path.name, render_report(report.page()))


PARTIAL: Final = "F1"
"""The finding that traces of ranks are missing, so totals are too small."""
FROM_CACHE: Final = "F9"
"""The finding that the page cache served reads, so their rate is not the storage's."""


def overview(events: EventsView, runs: Sequence[str], findings: Sequence[TraceFinding]) -> Answer:
    """Return a row for each run: span, calls, bytes, busy time, and the operation in progress for longest."""
    # The runs for which an alarm says that a number misleads.
    doubts = {(one.code, run) for one in findings if one.weight is Weight.ALARM for run in one.runs}
    extra = (
        f"coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT",
        f"coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT",
        "count(DISTINCT path)",
        f"sum({NUM_CALLS})::BIGINT",
    )
    busy = {row[0]: row[1:] for row in measure_groups(events, ("run",), where=IS_IO, extra=extra)}
    # The operation that was in progress longest in each run: its busy time, its longest call, and that call's
    # file.
    slow: dict[str, tuple[Any, ...]] = {}
    longest_call = (
        f"max(dur_us) FILTER (WHERE {IS_CALL})",
        f"arg_min(path, row(-dur_us, path)) FILTER (WHERE {IS_CALL})",
    )
    for run, op, _, _, union_us, _, longest_us, path in measure_groups(
        events, ("run", "op"), where=IS_IO, extra=longest_call
    ):
        # It is not known how long sums were in progress, so calls take precedence.
        last = slow.get(run, (None, 0, None, None))
        if (longest_us is not None, union_us) > (last[2] is not None, last[1]):
            slow[run] = (op, union_us, longest_us, path)
    who = events.ask(f"""
        SELECT run, max(last_us) - min(first_us), count(DISTINCT host),
               greatest(count(DISTINCT rank), max(most_ranks)),
               greatest(count(*) FILTER (pid <> {ALL_RANKS}), max(most_ranks))
        FROM (SELECT run, host, pid, min(rank) AS rank, min(ts_us) AS first_us, max(end_us) AS last_us,
                     -- Darshan has no records of ranks that did no I/O, or all of it in shared files.
                     coalesce(max({argument_sql("num_ranks")}) FILTER (WHERE NOT {IS_CALL}), 0) AS most_ranks
              FROM {{events}} GROUP BY run, host, pid) GROUP BY run""")
    counted = {row[0]: row[1:] for row in who}
    rows = []
    for run in runs:
        span_us, num_hosts, num_ranks, num_processes = counted.get(run, (0, 0, 0, 0))
        _, _, union_us, concurrency, read, written, num_files, num_calls = busy.get(
            run, (0, 0, 0, None, 0, 0, 0, 0)
        )
        is_partial = (PARTIAL, run) in doubts
        rate = (read + written) * 1e6 / union_us if union_us else None
        has_rate = not (is_partial or (FROM_CACHE, run) in doubts)
        rows.append(
            (run, span_us, union_us, union_us / span_us if span_us else None, concurrency,
             None if is_partial else read, None if is_partial else written,
             (read + written) // num_processes if num_processes else None, rate if has_rate else None,
             num_calls, num_files, num_processes, num_ranks, num_hosts, *slow.get(run, (None,) * 4))
        )  # fmt: skip
    columns = make_columns(
        "run", "span_us", Column("union_us", Unit.MICROSECONDS, "busy s"),
        Column("busy_share", Unit.SHARE, "busy"), Column("concurrency", Unit.RATIO, "calls at a time"),
        "read_bytes", "written_bytes",
        Column("per_process_bytes", Unit.BYTES, "moved by a process"),
        Column("busy_rate", Unit.RATE, "rate while busy"), "num_calls", "num_files", "num_processes",
        "num_ranks", "num_hosts", Column("slowest_op", Unit.TEXT, "longest under way"),
        Column("slowest_op_us", Unit.MICROSECONDS, "its busy s"),
        Column("longest_call_us", Unit.MICROSECONDS, "its longest call s"),
        Column("longest_call_path", Unit.TEXT, "on"),
    )  # fmt: skip
    notes = []
    for run in runs:
        if (PARTIAL, run) in doubts:
            notes.append(f"{run}: traces of ranks are missing, so its totals and its rate are left out (F1).")
        elif (FROM_CACHE, run) in doubts:
            notes.append(f"{run}: the page cache served reads, so its rate is left out (F9).")
    return Answer(name="overview", title="Runs", columns=columns, rows=rows, notes=notes)


def say_answer(answer: Answer, overlap: Answer) -> list[str]:
    """Return the first sentences of a report: one run in detail, or several in a sentence or two each."""
    spent: dict[Any, list[int]] = {}
    overlaps: list[Row] = list(overlap.records())
    for row in overlaps:
        sums = spent.setdefault(row["run"], [0, 0])
        sums[0] += row["io_us"]
        sums[1] += row["both_us"]
    says = []
    for row in answer.records():
        of_run = list(_say_run(row))
        says += of_run if len(answer.rows) == 1 else of_run[:1]
        io_us, both_us = spent.get(row["run"], (0, 0))
        if io_us:
            of_its = "the I/O" if len(answer.rows) == 1 else f"the I/O of {row['run']}"
            who = "rank" if row["num_ranks"] else "process"
            says.append(f"{_share(both_us / io_us)} of {of_its} was under way while its {who} computed.")
    return says


def _say_run(row: Mapping[str, Any]) -> Iterator[str]:
    if not row["num_calls"]:
        yield f"{row['run']} has no I/O in its trace, which spans {_seconds(row['span_us'])}."
        return
    who = _count(row["num_processes"], "process", "processes")
    if row["num_hosts"]:
        who += f" on {_count(row['num_hosts'], 'host')}"
    if row["num_ranks"]:
        who = f"{_count(row['num_ranks'], 'rank')}, {who}"
    # Darshan's sums over all ranks belong to no process.
    moved = f"moved {format_bytes(row['per_process_bytes'] or 0)} a process"
    if row["read_bytes"] is not None:
        moved = f"read {format_bytes(row['read_bytes'])} and wrote {format_bytes(row['written_bytes'])}"
    yield (
        f"In {_seconds(row['span_us'])}, {row['run']} {moved}, "
        f"with {_count(row['num_calls'], 'call')} on {_count(row['num_files'], 'file')} ({who})."
    )
    if row["longest_call_us"] is None:
        yield "These are sums by file and rank: single calls, their order and their times are not known."
        return
    rate = f", at {format_rate(row['busy_rate'])}" if row["busy_rate"] else ""
    yield (
        f"At least one call was under way for {_seconds(row['union_us'])}, "
        f"{_share(row['busy_share'] or 0)} of the run{rate}; "
        f"meanwhile, {row['concurrency'] or 0:.1f} ran at a time."
    )
    path = row["longest_call_path"]
    on = f", on {path.rsplit('/', 1)[-1]}" if path else ""
    yield (
        f"The operation longest under way was {row['slowest_op']}: {_seconds(row['slowest_op_us'])}. Its "
        f"longest call took {_seconds(row['longest_call_us'])}{on}."
    )


def _seconds(elapsed_us: int) -> str:
    return format_seconds(elapsed_us / 1e6)


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def _timeline(study: Study, axis: TimeAxis) -> tuple[Answer, Section]:
    answer = figures.call_bars(axis)
    charts, has_loops = [], False
    for run, rows in by_run(study.runs, answer.records()):
        lanes: list[tuple[Any, ...]] = list(
            dict.fromkeys((row["rank"], row["host"], row["pid"], row["tid"]) for row in rows)
        )
        places = {lane: place for place, lane in enumerate(lanes)}
        placed = [{**row, "y": places[row["rank"], row["host"], row["pid"], row["tid"]]} for row in rows]
        series = _series_of_kinds(placed, (*_CALLS, *_LOOP_PARTS), "y")
        has_loops |= any(row["kind"] in _LOOP_PARTS for row in rows)
        # A lane is named by its rank or process; further threads of the same rank or process by their own id.
        names, last = [], None
        for rank, host, pid, tid in lanes:
            own = f"rank {rank}" if rank is not None else _name_process(pid)
            names.append(f"thread {tid}" if (rank, host, pid) == last else own)
            last = (rank, host, pid)
        charts.append(
            Chart(
                kind=Kind.LANES, title=run, run=run, series=series, names=names, is_wide=True,
                x_end=axis.span_us / 1e6,
                note="; ".join(
                    note.removeprefix(f"{run}: ") for note in answer.notes if note.startswith(f"{run}: ")
                ),
            )
        )  # fmt: skip
    loops = " The strip above has a line for each step, below it waits and checkpoints." if has_loops else ""
    text = (
        "Each lane is a thread or a process. Reads and writes fill it, calls that move no data are at its "
        f"foot, and computation is in the background.{loops}"
    )
    return answer, Section(
        title="Calls by rank and thread",
        text=[text],
        charts=charts,
        why_empty="No event of these traces is I/O, computation or waiting.",
    )


def _rank_heat(study: Study, axis: TimeAxis, *, is_busy: bool) -> tuple[Answer, Section]:
    """Return a heat map of ranks; each cell is shaded by its bytes, or by the share of time it was busy."""
    answer = figures.rank_cells(axis).without(*(("read_bytes", "written_bytes") if is_busy else ("busy_us",)))
    width = format_seconds(axis.bucket_us(figures.HEAT_BUCKETS) / 1e6)
    rows: list[dict[str, Any]] = list(answer.records())
    for row in rows:
        time_us = row["bucket_us"] * row["num_processes"]
        row["value"] = row["busy_us"] / time_us if is_busy else row["read_bytes"] + row["written_bytes"]
    largest = max((row["value"] for row in rows), default=0.0)
    full = f"busy for {largest:.0%} of {width}" if is_busy else f"{format_bytes(largest)} in {width}"
    charts = []
    for run, of_run in by_run(study.runs, rows) if largest else ():
        # Ranks that computed but made no calls have no row.
        series = []
        for number in dict.fromkeys(row["row"] for row in of_run):
            of_rank = [row for row in of_run if row["row"] == number]
            x, ends = times_of(of_rank)
            y = [row["value"] for row in of_rank]
            series.append(Series(name=_name_ranks(of_rank[0]), x=x, ends=ends, y=y))
        charts.append(_heat(run, series, axis, largest, full))
    if is_busy:
        title, why_empty = "Busy time by rank and time", "No call of these traces took any time."
        says = "the larger the share in which at least one call was under way, the fuller its tone."
    else:
        title, why_empty = "Bytes by rank and time", _MISSING_BYTES
        says = "the more it moved, the fuller its tone."
    text = [f"Each cell is {width} of a rank: {says}"]
    return answer, Section(title=title, text=text, charts=charts, notes=answer.notes, why_empty=why_empty)


def _series_of_kinds(rows: Sequence[Row], kinds: Sequence[str], y: str, top: str = "") -> list[Series]:
    """Return a series for each kind of call present: its place in time, and its columns `y` and `top`."""
    made = []
    for kind in kinds:
        of_kind = [row for row in rows if row["kind"] == kind]
        x, ends = times_of(of_kind)
        tops = [row[top] for row in of_kind] if top else []
        if of_kind:
            values = [row[y] for row in of_kind]
            made.append(Series(name=kind, tone=TONES[kind], x=x, ends=ends, y=values, tops=tops))
    return made


def _name_process(pid: int) -> str:
    return "all ranks" if pid == ALL_RANKS else f"pid {pid}"


def _name_ranks(row: Row) -> str:
    if row["first_rank"] is None:
        more = f" +{row['num_processes'] - 1}" if row["num_processes"] > 1 else ""
        return f"{_name_process(row['pid'])}{more}"
    first, last = row["first_rank"], row["last_rank"]
    return f"rank {first}" if first == last else f"rank {first}-{last}"


def _heat(run: str, series: Sequence[Series], axis: TimeAxis, largest: float, full: str) -> Chart:
    return Chart(
        kind=Kind.HEAT,
        title=run,
        run=run,
        series=series,
        x_end=axis.span_us / 1e6,
        y_end=largest,
        note=f"full tone: {full}",
        is_wide=len(axis.runs) <= 2,
    )


def _bandwidth(study: Study, axis: TimeAxis) -> tuple[Answer, Section]:
    answer = figures.bandwidth(axis)
    width = format_seconds(axis.bucket_us(figures.BANDWIDTH_BUCKETS) / 1e6)
    text = f"Bytes in each {width}; all runs of a tier share one axis: reads rise, writes hang from zero."
    charts = bandwidth_charts(study.runs, answer.records(), axis.span_us / 1e6)
    return answer, Section(title="Bandwidth over time", text=[text], charts=charts, why_empty=_MISSING_BYTES)


def _overlap(study: Study, axis: TimeAxis) -> tuple[Answer, Section]:
    answer = figures.overlap_lanes(axis)
    without = _runs_without(study, axis, "num_compute")
    missing = (
        f"No event of {without} is computation (a name that contains `compute`, or a rule of --phase)."
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
                x_end=axis.span_us / 1e6,
            )
        )  # fmt: skip
    text = f"The share of processes that only compute, do both, or only do I/O. {missing}".strip()
    return answer, Section(title="Computation and I/O", text=[text], charts=charts, why_empty=missing)


def _runs_without(study: Study, axis: TimeAxis, wanted: str) -> str:
    """Return, for a sentence, the runs that have nothing of what `wanted` counts; "" if there are none."""
    runs = axis.runs
    missing = [run for run in study.runs if run not in runs or not getattr(runs[run], wanted)]
    return "these traces" if len(missing) == len(study.runs) else ", ".join(missing)


def _bins(study: Study, _: TimeAxis, *, is_sizes: bool) -> tuple[Answer, Section]:
    if is_sizes:
        answer, title, why_empty = figures.size_bins(study.events), "Sizes of transfers", _MISSING_BYTES
        text = "A bin extends from its label to twice that size: how many calls it has, how many bytes."
        unit, total = "bytes", ("total_bytes", "bytes")
    else:
        answer, title = figures.latency_bins(study.events), "Durations of calls"
        why_empty = "These traces have no I/O."
        text = "Bins begin at 1, 2 and 5 times powers of ten: how many calls each has, how much time."
        unit, total = "us", ("sum_us", "time, summed over threads")
    counted = (("num_calls", "calls"), total)
    charts = bin_charts(study.runs, answer.records(), f"from_{unit}", f"to_{unit}", counted)
    return answer, Section(title=title, text=[text], charts=charts, why_empty=why_empty)


def _offsets(study: Study, axis: TimeAxis) -> tuple[Answer, Section]:
    answer = figures.file_offsets(axis)
    without = _runs_without(study, axis, "num_offsets")
    missing = f"No read or write of {without} gives its offset." if without else ""
    charts = []
    for run, rows in by_run(study.runs, answer.records()):
        for path in dict.fromkeys(row["path"] for row in rows):
            of_path = [row for row in rows if row["path"] == path]
            series = _series_of_kinds(of_path, ("read", "write"), "from_bytes", "to_bytes")
            charts.append(
                Chart(
                    kind=Kind.SPANS, title=f"{run}: {path.rsplit('/', 1)[-1]}", run=run, unit="B", note=path,
                    series=series, x_end=axis.span_us / 1e6, y_end=of_path[0]["length_bytes"],
                )
            )  # fmt: skip
    text = (
        "The files of each run with the most bytes: a rising line is sequential, a cloud is random. "
        + missing
    )
    return answer, Section(title="Offsets over time", text=[text.strip()], charts=charts, why_empty=missing)


def _files(study: Study, _: TimeAxis) -> tuple[Answer, Section]:
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
        text=["A file is under way while at least one call on it runs."],
        parts=parts,
        why_empty="No call of these traces names a file.",
    )


def _metadata(study: Study, axis: TimeAxis) -> tuple[Answer, Section]:
    answer = figures.metadata_calls(axis)
    width = format_seconds(axis.bucket_us(figures.HEAT_BUCKETS) / 1e6)
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
        charts.append(_heat(run, series, axis, largest, f"{largest:,} calls in {width}"))
    return answer, Section(
        title="Metadata operations over time",
        text=[f"Calls that move no data. Each cell is {width}: more calls, fuller tone."],
        charts=charts,
        why_empty="These traces have no call that moves no data, such as open or stat.",
    )


def _operations(study: Study, _: TimeAxis) -> tuple[Answer, Section]:
    answer = figures.operations(study.events)
    return answer, Section(
        title="Operations",
        text=["Sums add all threads; a mean and a longest call show how a sum came about."],
        tables=[replace(table, title="") for table in answer_tables(answer)],
        why_empty="These traces have no I/O.",
    )


_FIGURES: Final[Mapping[str, Callable[[Study, TimeAxis], tuple[Answer, Section]]]] = {
    "timeline": _timeline,
    "rank_bytes": partial(_rank_heat, is_busy=False),
    "rank_busy": partial(_rank_heat, is_busy=True),
    "bandwidth": _bandwidth,
    "overlap": _overlap,
    "sizes": partial(_bins, is_sizes=True),
    "latencies": partial(_bins, is_sizes=False),
    "offsets": _offsets,
    "files": _files,
    "metadata": _metadata,
    "operations": _operations,
}
