"""Panels of single calls, from the rows of `calls`: lanes of threads, and offsets in files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from penstock.reports.panels import Panel, Row, Scale, Shape, Sheet, bars_path, group_rows
from penstock.reports.ticks import byte_ticks, lane_ticks
from penstock.trace.event_schema import name_process
from penstock.trace.questions.answer import Answer

_HEIGHT: Final = 88
_CALLS: Final = ("compute", "metadata", "read", "write")
_LOOP_PARTS: Final = ("checkpoint", "barrier", "wait", "step")
_BACK_TO_FRONT: Final = (*_CALLS, *_LOOP_PARTS)
_STRIP: Final = 6.0
"""The part of a lane, above its calls, that shows what its program's loop does."""
_EDGE: Final = 1.5
"""What a step is shorter in the drawing than it was, so that the next one is seen to begin."""

Lane = tuple[int | None, str | None, int, int]
"""Rank, host, process and thread."""


def draw_calls(answer: Answer, sheet: Sheet) -> list[Panel]:
    """Calls of each thread over time, a lane a thread."""
    panels = []
    ticks, unit = sheet.time_ticks()
    for run, rows in sheet.by_run(answer.records()):
        lanes = list(dict.fromkeys(map(_lane, rows)))
        strip = _STRIP if any(row["kind"] in _LOOP_PARTS for row in rows) else 0.0
        height = int(strip) + (14 if len(lanes) <= 24 else 10)
        tops = {lane: height * number for number, lane in enumerate(lanes)}
        by_kind = group_rows(rows, "kind")
        notes = [note.removeprefix(f"{run}: ") for note in answer.notes if note.startswith(f"{run}: ")]
        panels.append(
            Panel(
                title=run,
                run=sheet.hues[run],
                height=height * len(lanes),
                shapes=[
                    Shape(
                        kind, bars_path(_lane_bars(by_kind[kind], tops, _edges(kind, height, strip), sheet))
                    )
                    for kind in _BACK_TO_FRONT
                    if kind in by_kind
                ],
                x_ticks=ticks,
                x_title=unit,
                y_ticks=lane_ticks(_name_lanes(lanes), 24 if height > 10 else 16),
                note="; ".join(notes),
            )
        )
    return panels


def _lane(row: Row) -> Lane:
    return row["rank"], row["host"], row["pid"], row["tid"]


def looks_of(answer: Answer) -> list[str]:
    """The kinds of calls, and those parts of a loop that there are, for a legend."""
    kinds = {row["kind"] for row in answer.records()}
    return ["read", "write", "metadata", "compute", *(part for part in _LOOP_PARTS if part in kinds)]


def has_loops(answer: Answer) -> bool:
    """Whether a program recorded what its loop does."""
    return any(row["kind"] in _LOOP_PARTS for row in answer.records())


def _lane_bars(
    rows: Sequence[Row], tops: Mapping[Lane, float], edges: tuple[float, float], sheet: Sheet
) -> Iterator[tuple[float, float, float, float]]:
    across = sheet.across()
    for row in rows:
        top = tops[_lane(row)]
        left, right = across.place(row["since_start_us"]), across.place(row["until_us"])
        yield left, right - (_EDGE if row["kind"] == "step" else 0.0), top + edges[0], top + edges[1]


def _edges(kind: str, height: float, strip: float) -> tuple[float, float]:
    """Where a kind of bar is in its lane, from the lane's top.

    Computation fills the lane behind the calls; calls that move nothing are at its foot. Steps are a line
    above them, and what a step waits for is under this line.
    """
    if kind in _LOOP_PARTS:
        return (0.5, 2.0) if kind == "step" else (2.5, strip)
    inner = {"compute": (0.5, height - 0.5), "metadata": (strip + (height - strip) * 0.62, height - 1.5)}
    return inner.get(kind, (strip + 1.5, height - 1.5))


def _name_lanes(lanes: Sequence[Lane]) -> list[str]:
    """A lane is named by its rank, or its process; further threads of the same by their own id."""
    names, last = [], None
    for rank, host, pid, tid in lanes:
        process = (rank, host, pid)
        own = f"rank {rank}" if rank is not None else name_process(pid)
        names.append(f"thread {tid}" if process == last else own)
        last = process
    return names


def draw_offsets(answer: Answer, sheet: Sheet) -> list[Panel]:
    """A panel for each of the busiest files: the part of the file that is read or written, over time."""
    return [
        _draw_file(run, path, of_file, sheet)
        for run, rows in sheet.by_run(answer.records())
        for path, of_file in group_rows(rows, "path").items()
    ]


def _draw_file(run: str, path: str, rows: Sequence[Row], sheet: Sheet) -> Panel:
    length = rows[0]["length_bytes"]
    ticks, unit = sheet.time_ticks()
    return Panel(
        title=f"{run}: {path.rsplit('/', 1)[-1]}",
        run=sheet.hues[run],
        height=_HEIGHT,
        shapes=[
            Shape(kind, bars_path(_offset_bars(of_kind, sheet.across(), Scale(length, _HEIGHT))))
            for kind, of_kind in sorted(group_rows(rows, "kind").items())
        ],
        x_ticks=ticks,
        x_title=unit,
        y_ticks=byte_ticks(length),
        note=path,
    )


def _offset_bars(
    rows: Sequence[Row], across: Scale, upwards: Scale
) -> Iterator[tuple[float, float, float, float]]:
    for row in rows:
        top = _HEIGHT - upwards.place(row["to_bytes"])
        bottom = max(_HEIGHT - upwards.place(row["from_bytes"]), top + 1.0)
        left, right = across.place(row["since_start_us"]), across.place(row["until_us"])
        yield left, max(right, left + 2), top, bottom
