"""Runs of the key-value cache and vector search benchmarks: commands, and figures of their ranks.

    option_O/trial_T/rank_N/kvcache_results_*.json     one rank's own figures of a key-value cache
    vectordb/simple/vdb_multi_node_summary.json        or statistics.json: figures of all ranks of vector
    search

The metadata's parameters of a key-value cache are the tool's defaults and not what its options ran, so
settings are read from the commands that were executed. Invariant: a stated rate is never used.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from penstock.submission.folder_listing import list_folder, list_subfolders
from penstock.submission.parsed_file import NO_FILE, MissingFact, ParsedFile, read_file, relative

OLD_SUMMARY: Final = re.compile(r"kvcache_run_summary_\d{8}_\d{6}\.json")
"""The name of the summary in older tools."""
SUMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "aggregated_read_bandwidth_gbps": ("cache_stats", "tier_storage_read_bandwidth_gbps"),
        "aggregated_write_bandwidth_gbps": ("cache_stats", "tier_storage_write_bandwidth_gbps"),
        "aggregated_avg_throughput_tokens_per_sec": ("avg_throughput_tokens_per_sec",),
        "aggregated_storage_throughput_tokens_per_sec": ("storage_throughput_tokens_per_sec",),
    }
)
"""Figures of an option: sums over ranks, averaged over trials, and where a rank states them."""
LATENCY: Final = "aggregated_p95_latency_ms"
VERDICT: Final = "result_verdict.json"
"""The file that states whether the ground truth of vector search is whole."""
_PLACE: Final = re.compile(r"option_(\d+)/trial_(\d+)")
_RANK_FILE: Final = re.compile(r"kvcache_results_.*\.json", re.IGNORECASE)
_NUM_PROCESSES: Final = ("-n", "-np", "--np", "--ntasks")
_NUMBER: Final = re.compile(r"-*\d+(\.\d*)?|-*\.\d+")
_AGGREGATES: Final = ("vdb_multi_node_summary.json", "statistics.json")


@dataclass(frozen=True, slots=True)
class RankResult:
    """The summary of one rank's file, and its place."""

    option: int
    trial: int
    rank: int
    summary: ParsedFile


@dataclass(frozen=True, slots=True)
class CacheCommand:
    """A command that the tool executed for one trial of one option; flags without values are empty texts.

    `num_processes` is 0 where the launcher's command does not state it.
    """

    option: int
    trial: int
    num_processes: int
    options: Mapping[str, str]


def read_rank_results(folder: Path, base: Path) -> tuple[RankResult, ...]:
    """The files of all ranks below a run's folder, in order; of each only the summary is kept."""
    found = []
    for option, option_folder in _numbered(folder, "option"):
        for trial, trial_folder in _numbered(option_folder, "trial"):
            for rank, rank_folder in _numbered(trial_folder, "rank"):
                for path in filter(lambda each: _RANK_FILE.fullmatch(each.name), list_folder(rank_folder)):
                    parsed = read_file(path, base)
                    content = parsed.content.get("summary") if isinstance(parsed.content, dict) else None
                    summary = ParsedFile(file=parsed.file, content=content or {}, problem=parsed.problem)
                    found.append(RankResult(option, trial, rank, summary))
    return tuple(found)


def _numbered(folder: Path, kind: str) -> list[tuple[int, Path]]:
    return sorted(
        (int(entry.name[len(kind) + 1 :]), entry)
        for entry in list_subfolders(folder)
        if re.fullmatch(rf"{kind}_\d+", entry.name)
    )


def read_commands(metadata: ParsedFile) -> tuple[CacheCommand, ...]:
    """The commands of all trials in the order of their execution."""
    entries = metadata.value("command_output_files") or []
    texts = [str(entry.get("command", "")) for entry in entries if isinstance(entry, dict)]
    commands = tuple(command for text in texts if (command := _parse_command(text)))
    if not commands:
        raise MissingFact("command_output_files names no command of a trial", where=metadata.file)
    return commands


def _parse_command(text: str) -> CacheCommand | None:
    place = _PLACE.search(text)
    try:
        words = shlex.split(text)
    except ValueError:  # its quotes are cut off: it is no command of a trial
        return None
    if place is None or "--num-users" not in text:
        return None
    program = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
    launcher = _flags(words[:program])
    number = next((launcher[name] for name in _NUM_PROCESSES if name in launcher), "")
    return CacheCommand(
        option=int(place[1]),
        trial=int(place[2]),
        num_processes=int(number) if number.isdigit() else 0,
        options={name.removeprefix("--"): value for name, value in _flags(words[program + 1 :]).items()},
    )


def _flags(words: list[str]) -> dict[str, str]:
    """Flags and their values: ["--seed", "42", "--quiet", "--n=3"] is {--seed: 42, --quiet: "", --n: 3}."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            name, equals, value = word.partition("=")
            found[name] = value if equals else "" if following.startswith("-") else following
    return found


def recompute_option(ranks: tuple[RankResult, ...], option: int) -> dict[str, float]:
    """The figures of an option: sums over ranks, then means over trials; the largest latency of all."""
    of_option = [rank for rank in ranks if rank.option == option]
    if not of_option:
        raise MissingFact(f"there is no file of a rank of option {option}", where="option_*/trial_*/rank_*")
    trials = sorted({rank.trial for rank in of_option})
    figures = {
        name: sum(
            sum(rank.summary.number(*path) for rank in of_option if rank.trial == trial) for trial in trials
        )
        / len(trials)
        for name, path in SUMS.items()
    }
    return figures | {LATENCY: max(rank.summary.number("storage_io_latency_ms", "p95") for rank in of_option)}


def ranks_in_memory(ranks: tuple[RankResult, ...], option: int) -> Iterator[RankResult]:
    """The ranks that stored nothing: their tier in memory served everything."""
    path = ("cache_stats", "storage_entries")
    for rank in ranks:
        if rank.option == option and rank.summary.has(*path) and rank.summary.number(*path) == 0:
            yield rank


def options_of(summary: ParsedFile) -> dict[int, ParsedFile]:
    """Each option's part of a run's summary."""
    options: Any = summary.value("options")
    if not isinstance(options, dict):
        raise MissingFact("options is no mapping", where=summary.file)
    return {
        int(name): ParsedFile(file=summary.file, content=entry)
        for name, entry in options.items()
        if str(name).isdigit()
    }


def is_error_free(summary: ParsedFile) -> bool:
    """Check whether no rank's file is missing and no launch failed; rounds publish the latest such run."""
    if summary.problem or not summary.has("options") or summary.content.get("trial_failures"):
        return False
    return not summary.has("partial_failure") or summary.value("partial_failure") is False


def read_aggregate(folder: Path, base: Path) -> ParsedFile:
    """The figures over all ranks of vector search, under either of two names, at most three levels down."""
    found: dict[str, Path] = {}
    level = [folder]
    for _ in range(4):
        for path in (path for place in level for path in list_folder(place)):
            if path.name in _AGGREGATES:
                found[path.name] = path
        level = [below for place in level for below in list_subfolders(place)]
    for name in _AGGREGATES:
        if name in found:
            return read_file(found[name], base)
    return ParsedFile(file=f"{relative(folder, base)}/{_AGGREGATES[0]}", problem=NO_FILE)


def recompute_run(aggregate: ParsedFile) -> dict[str, float]:
    """Queries, seconds and queries per second over all ranks; of a run without ranks by its own totals.

    The time is from the first rank's start to the last one's end.
    """
    if not aggregate.has("rank_summaries"):
        queries, seconds = aggregate.number("total_queries"), aggregate.number("total_time_seconds")
        if seconds <= 0:
            raise MissingFact(f"total_time_seconds is {seconds:g}", where=aggregate.file)
    else:
        entries = aggregate.value("rank_summaries")
        if not isinstance(entries, list) or not entries:
            raise MissingFact("rank_summaries has no rank", where=aggregate.file)
        ranks = [ParsedFile(file=aggregate.file, content=entry) for entry in entries]
        queries = sum(rank.number("total_queries") for rank in ranks)
        begin = min(rank.number("start_time") for rank in ranks)
        seconds = max(rank.number("end_time") for rank in ranks) - begin
        if seconds <= 0:
            raise MissingFact("its ranks took no time", where=aggregate.file)
    return {"query_count": queries, "total_time_seconds": seconds, "throughput_qps": queries / seconds}
