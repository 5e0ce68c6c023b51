"""What a run of the vector search benchmark measured, recomputed from what each of its ranks reports.

    summary.json
    vectordb/simple/vdb_multi_node_summary.json or statistics.json     with the ranks' own figures
    result_verdict.json                                                whether the ground truth is whole

Invariant: a stated rate is never used; it is the sum of the ranks' queries over the time from the first
rank's start to the last one's end.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.submission.folder_listing import list_folder, list_subfolders
from penstock.submission.parsed_file import NO_FILE, MissingFact, ParsedFile, read_file, relative

VERDICT: Final = "result_verdict.json"
AGGREGATES: Final = ("vdb_multi_node_summary.json", "statistics.json")


def read_aggregate(folder: Path, base: Path) -> ParsedFile:
    """The figures over all ranks, under either of the tools' names, at most three levels down."""
    found = {path.name: path for path in _search(folder, 3)}
    for name in AGGREGATES:
        if name in found:
            return read_file(found[name], base)
    return ParsedFile(file=f"{relative(folder, base)}/{AGGREGATES[0]}", problem=NO_FILE)


def _search(folder: Path, depth: int) -> Iterator[Path]:
    yield from (entry for entry in list_folder(folder) if entry.name in AGGREGATES)
    if depth:
        for below in list_subfolders(folder):
            yield from _search(below, depth - 1)


def ranks_of(aggregate: ParsedFile) -> list[ParsedFile]:
    """Each rank's own figures."""
    ranks = aggregate.value("rank_summaries")
    if not isinstance(ranks, list) or not ranks:
        raise MissingFact("rank_summaries has no rank", where=aggregate.file)
    return [ParsedFile(file=aggregate.file, content=rank) for rank in ranks]


def recompute_run(aggregate: ParsedFile) -> dict[str, float]:
    """Queries, seconds and queries per second over all ranks; of a run without ranks by its own totals."""
    if not aggregate.has("rank_summaries"):
        queries, seconds = aggregate.number("total_queries"), aggregate.number("total_time_seconds")
        if seconds <= 0:
            raise MissingFact(f"total_time_seconds is {seconds:g}", where=aggregate.file)
        return {
            "query_count": queries,
            "total_time_seconds": seconds,
            "throughput_qps": queries / seconds,
        }
    ranks = ranks_of(aggregate)
    queries = sum(rank.number("total_queries") for rank in ranks)
    begin, end = (
        min(rank.number("start_time") for rank in ranks),
        max(rank.number("end_time") for rank in ranks),
    )
    if end <= begin:
        raise MissingFact("its ranks took no time", where=aggregate.file)
    return {
        "query_count": queries,
        "total_time_seconds": end - begin,
        "throughput_qps": queries / (end - begin),
    }
