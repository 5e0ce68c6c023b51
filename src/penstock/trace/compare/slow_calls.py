"""Find calls slower than usual for their kind and size, and where: in some files, at some time, everywhere.

    each call, and what one of its kind and size usually takes -> excess -> the place that has most of it

Sums hide where time went: one bad file in a thousand, or storage that became slow halfway, looks like slow
reads. A place is named only if most of the excess is there, and calls elsewhere take as long as usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from penstock.errors import name_some
from penstock.trace.compare.query_findings import MEMORY_RATE, spread_over_ranks
from penstock.trace.compare.trace_study import Study, TraceFinding, Weight
from penstock.trace.dimensions import IS_CALL, IS_IO, IS_READ, IS_WRITE, sql_literal
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.units import format_seconds

_ENOUGH_CALLS: Final = 20
_ENOUGH_FILES: Final = 10
_FEW_FILES: Final = 0.05
_SLOW: Final = 1.5
_CHANGED: Final = 1.25
_MOST: Final = 0.6
_SLICES: Final = 40
_LEAST_SLICES: Final = 4
_TIMED: Final = "penstock_timed"
"""The table of calls: run, what, file_class, path, rank_name, ts_us, slice, size_bytes, dur_us, usual_us."""

Rows = Sequence[tuple[Any, ...]]
"""For each place: its name, calls, the microseconds that they took, and those that they usually take."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place where calls are slow.

    `title` is the end of a title, `says` a sentence, `where` the SQL condition of the calls. `rows` has all
    places of this kind.
    """

    kind: str
    title: str
    says: str
    where: str
    excess_us: float
    rows: Rows
    is_from_cache: bool = False
    """True if the baseline's calls were faster than any device."""


def slow_calls(study: Study) -> list[TraceFinding]:
    """Return F14 for calls slower than usual for their kind and size: in files, since a time, or everywhere.

    The usual time is the baseline's; in the baseline itself, it is the median. If only some ranks' calls are
    slow, the ranks are stragglers (F8).
    """
    base = sql_literal(study.baseline)
    study.work.ask(f"""
        CREATE OR REPLACE TEMP TABLE {_TIMED} AS
        WITH calls AS (
            SELECT run, CASE WHEN {IS_READ} THEN 'read' WHEN {IS_WRITE} THEN 'write' ELSE op END AS what,
                   file_class, path, rank_name, ts_us, dur_us, size_bytes,
                   coalesce(floor(log2(nullif(size_bytes, 0))), -1) AS magnitude
            FROM {{events}} WHERE {IS_IO} AND {IS_CALL} AND path IS NOT NULL),
        extents AS (
            SELECT run, what, min(ts_us) AS first_us, max(ts_us) + 1 - min(ts_us) AS span_us
            FROM calls GROUP BY run, what),
        usual AS (
            SELECT what, file_class, magnitude, avg(dur_us) AS mean_us, median(dur_us) AS median_us
            FROM calls WHERE run = {base} GROUP BY what, file_class, magnitude)
        SELECT run, what, file_class, path, rank_name, ts_us, size_bytes, dur_us,
               {_SLICES} * (ts_us - first_us) // span_us AS slice,
               greatest(1, CASE WHEN run = {base} THEN median_us ELSE mean_us END) AS usual_us
        FROM calls JOIN extents USING (run, what) JOIN usual USING (what, file_class, magnitude)""")
    kinds: dict[str, list[str]] = {}
    for run, what in study.work.ask(f"""
        SELECT run, what FROM {_TIMED} GROUP BY run, what HAVING count(*) >= {_ENOUGH_CALLS}
        ORDER BY {study.in_order()}, what"""):
        kinds.setdefault(run, []).append(what)
    findings = [finding for run, of_run in kinds.items() for finding in _find_slow(study, run, of_run)]
    # The table is as large as the trace.
    study.work.ask(f"DROP TABLE {_TIMED}")
    return findings


def _find_slow(study: Study, run: str, kinds: Sequence[str]) -> list[TraceFinding]:
    found = [(what, place) for what in kinds if (place := _locate(study, run, what))]
    everywhere = [_name(what) for what, place in found if place.kind == "all"]
    findings = []
    for what, place in found:
        sum_us = place.excess_us
        lost_us = spread_over_ranks(study, run, where=f"{_is(what)} AND {place.where}", sum_us=sum_us)
        columns = make_columns(
            "where", "num_calls", Column("mean_us", Unit.NUMBER), Column("usual_us", Unit.NUMBER), "excess_us"
        )
        rows = [
            (where, num, took / num, usual / num, round(took - usual))
            for where, num, took, usual in place.rows
        ]
        name = f"f14_{run}_{what}_{place.kind}"
        answer = Answer(name=name, title=f"Microseconds of a call of {what}", columns=columns, rows=rows)
        says, queue = [place.says], _say_queue(study, run, what)
        others = ", ".join(other for other in everywhere if other != _name(what))
        if queue:
            says.append(queue)
        elif place.kind == "all" and len(kinds) > 1 and not place.is_from_cache:
            says.append(
                f"So are {others}: the storage is slower, or others use it, too."
                if others
                else "Calls of other kinds are not: look at how these are made before suspecting the storage."
            )
        title = f"{run}: {_name(what)} {place.title}"
        findings.append(TraceFinding("F14", Weight.COST, title, [run], says, answer, lost_us))
    return findings


def _name(what: str) -> str:
    return f"{what}s" if what in ("read", "write") else f"calls of {what}"


def _is(what: str) -> str:
    return {"read": IS_READ, "write": IS_WRITE}.get(what, f"op = {sql_literal(what)}")


def _locate(study: Study, run: str, what: str) -> _Place | None:
    """Find where the calls of a kind are slow; None if they are not."""
    calls = f"FROM {_TIMED} WHERE run = {sql_literal(run)} AND what = {sql_literal(what)}"
    rates = "count(*), sum(dur_us)::DOUBLE AS took, sum(usual_us) AS usual"
    excess_us, num_files, above_us = study.work.ask_one(f"""
        SELECT sum(above), count(*), coalesce(sum(greatest(0, above)), 0)
        FROM (SELECT sum(dur_us) - sum(usual_us) AS above {calls} GROUP BY path)""")
    files = study.work.ask(f"""
        SELECT path, {rates} {calls} GROUP BY path
        HAVING count(*) > 1 AND quantile_disc(dur_us / usual_us, 0.34) > {_SLOW}
        ORDER BY took - usual DESC, path LIMIT {max(1, round(_FEW_FILES * num_files))}""")
    of_files_us = sum(took - usual for _, _, took, usual in files)
    if num_files >= _ENOUGH_FILES and of_files_us > _MOST * above_us and 2 * excess_us > of_files_us:
        names = name_some([path.rsplit("/", 1)[-1] for path, *_ in files])
        number = "one file" if len(files) == 1 else f"{len(files)} files"
        title = f"of {number} are slow: {names}"
        where = f"path IN ({', '.join(sql_literal(path) for path, *_ in files)})"
        says = f"Of {num_files:,} files, {names} took {_mean(files)}, where {_usual(files)} is usual."
        return _Place("files", title, says, where, of_files_us, files)
    ranks = study.work.ask(f"SELECT rank_name, {rates} {calls} GROUP BY rank_name")
    is_slow = [took > _SLOW * usual for _, _, took, usual in ranks]
    if any(is_slow) and any(
        took < _CHANGED * usual for (_, _, took, usual), slow in zip(ranks, is_slow, strict=True) if not slow
    ):
        return None
    return _locate_in_time(study, run, calls, rates) or _see_everywhere(study, run, what, calls, rates)


def _locate_in_time(study: Study, run: str, calls: str, rates: str) -> _Place | None:
    """Find the time since which, or until which, calls are slow."""
    slices = study.work.ask(
        f"SELECT slice, {rates}, min(ts_us) {calls} GROUP BY slice HAVING sum(usual_us) > 0 ORDER BY slice"
    )
    if len(slices) < 2 * _LEAST_SLICES:
        return None
    took, usual = (list(accumulate(row[place] for row in slices)) for place in (2, 3))

    def gain(cut: int) -> Any:
        """Return the variance between the ratios before and after a cut."""
        before, after = (
            took[cut - 1] / usual[cut - 1],
            (took[-1] - took[cut - 1]) / (usual[-1] - usual[cut - 1]),
        )
        return usual[cut - 1] * (usual[-1] - usual[cut - 1]) * (after - before) ** 2

    cut = max(range(_LEAST_SLICES, len(slices) - _LEAST_SLICES + 1), key=gain)
    before, after = slices[:cut], slices[cut:]
    ratio_before, ratio_after = (
        sum(row[2] for row in of) / sum(row[3] for row in of) for of in (before, after)
    )
    is_since = ratio_after > ratio_before
    fast, slow = (before, after) if is_since else (after, before)
    low, high = sorted((ratio_before, ratio_after))
    edge = (low * high) ** 0.5
    # A few slow moments are not a change: nearly all slices before the cut must be slow, and nearly all
    # after it fast, or the reverse.
    num_right = sum(row[2] < edge * row[3] for row in fast) + sum(row[2] > edge * row[3] for row in slow)
    if high < _SLOW * low or high < _CHANGED or num_right < 0.8 * len(slices):
        return None
    at_us = after[0][4]
    (origin_us,) = study.work.ask_one(f"SELECT min(ts_us) FROM {{events}} WHERE run = {sql_literal(run)}")
    since = f"{'since' if is_since else 'until'} {format_seconds((at_us - origin_us) / 1e6)}"
    steps = study.work.ask(f"""
        SELECT epoch, step FROM {{events}} WHERE run = {sql_literal(run)} AND step IS NOT NULL
        AND ts_us <= {at_us} AND phase IN ('wait', 'loop') ORDER BY ts_us DESC LIMIT 1""")
    step = f", which is step {steps[0][1]}" if steps else ""
    step += f" of epoch {steps[0][0]}" if steps and steps[0][0] is not None else ""
    rows = [
        (name, *(sum(row[place] for row in of) for place in (1, 2, 3)))
        for name, of in ((f"before {since.split(' ', 1)[1]}", before), ("after", after))
    ]
    of_slow = [rows[1] if is_since else rows[0]]
    of_fast = [rows[0] if is_since else rows[1]]
    says = f"They take {_mean(of_slow)} {since} after the start{step}, and {_mean(of_fast)} otherwise."
    where = f"ts_us {'>=' if is_since else '<'} {at_us}"
    # The time that slow calls would save if they were as fast as the others.
    excess_us = sum(row[2] for row in slow) - sum(row[3] for row in slow) * low
    return _Place("time", f"are slow {since} after the start", says, where, excess_us, rows)


def _see_everywhere(study: Study, run: str, what: str, calls: str, rates: str) -> _Place | None:
    """Return a `_Place` for all calls of a kind if they are slower than in the baseline, otherwise None."""
    rows = study.work.ask(
        f"SELECT file_class, {rates} {calls} GROUP BY file_class ORDER BY took - usual DESC"
    )
    took_us, usual_us = (sum(row[place] for row in rows) for place in (2, 3))
    if run == study.baseline or took_us < _CHANGED * usual_us:
        return None
    (moved,) = study.work.ask_one(f"SELECT coalesce(sum(size_bytes), 0) {calls}")
    says = (
        f"They take {_mean(rows)}, in {study.baseline} {_usual(rows)} at equal sizes, on most files and "
        "ranks, and most of the time."
    )
    is_from_cache = what == "read" and moved * 1e6 > MEMORY_RATE * usual_us
    if is_from_cache:
        says = (
            f"They take {_mean(rows)}, in {study.baseline} {_usual(rows)} at equal sizes, because there they "
            "came from the page cache."
        )
    title, excess_us = f"are slower than in {study.baseline}", took_us - usual_us
    return _Place("all", title, says, "true", excess_us, rows, is_from_cache)


def _say_queue(study: Study, run: str, what: str) -> str:
    """Return a sentence if concurrent calls end one after another, as they do under a lock; otherwise ""."""
    (num, shortest_us, mean_us) = study.work.ask_one(f"""
        SELECT count(*), quantile_cont(gap_us, 0.1), avg(gap_us)
        FROM (SELECT end_us - lag(end_us) OVER by_end AS gap_us, ts_us < lag(end_us) OVER by_end AS is_waiting
              FROM {{events}} WHERE run = {sql_literal(run)} AND {IS_IO} AND {IS_CALL} AND {_is(what)}
              WINDOW by_end AS (ORDER BY end_us))
        WHERE is_waiting""")
    if num < _ENOUGH_CALLS or not mean_us or shortest_us < mean_us / 2:
        return ""
    apart = format_seconds(mean_us / 1e6)
    return f"Concurrent calls end one by one, {apart} apart: a lock or a single server serializes them."


def _mean(rows: Rows) -> str:
    return f"{format_seconds(sum(row[2] for row in rows) / sum(row[1] for row in rows) / 1e6)} a call"


def _usual(rows: Rows) -> str:
    return format_seconds(sum(row[3] for row in rows) / sum(row[1] for row in rows) / 1e6)
