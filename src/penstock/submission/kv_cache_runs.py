"""What a run of the key-value cache benchmark did: its commands, and the figures of its ranks.

    option_1_results.json, summary.json
    option_O/trial_T/rank_N/kvcache_results_*.json     one rank's own figures

The metadata's parameters are the tool's defaults and not what its options ran, so that settings are read from
the commands that were executed. Invariant: figures are recomputed from the ranks' files alone.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from penstock.submission.folder_listing import list_folder, list_subfolders
from penstock.submission.parsed_file import MissingFact, ParsedFile, read_file

OLD_SUMMARY: Final = re.compile(r"kvcache_run_summary_\d{8}_\d{6}\.json")
"""What older tools called the summary."""
_PLACE: Final = re.compile(r"option_(\d+)/trial_(\d+)")
_RANK_FILE: Final = re.compile(r"kvcache_results_.*\.json", re.IGNORECASE)

_NUM_PROCESSES: Final = ("-n", "-np", "--np", "--ntasks")

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
_RANK_LATENCY: Final = ("storage_io_latency_ms", "p95")
_STORED: Final = ("cache_stats", "storage_entries")


@dataclass(frozen=True, slots=True)
class RankResult:
    """The summary of one rank's file, and where it lies."""

    option: int
    trial: int
    rank: int
    summary: ParsedFile


@dataclass(frozen=True, slots=True)
class CacheCommand:
    """A command that the tool executed for one trial of one option; flags without values are empty texts.

    `num_processes` is 0 where the launcher is not told.
    """

    option: int
    trial: int
    num_processes: int
    options: Mapping[str, str]


def read_rank_results(folder: Path, base: Path) -> tuple[RankResult, ...]:
    """The files of all ranks below a run's folder, in order; of each only the summary is kept."""
    return tuple(
        RankResult(option, trial, rank, _summary_of(path, base))
        for option, option_folder in _numbered(folder, "option")
        for trial, trial_folder in _numbered(option_folder, "trial")
        for rank, rank_folder in _numbered(trial_folder, "rank")
        for path in list_folder(rank_folder)
        if _RANK_FILE.fullmatch(path.name)
    )


def _numbered(folder: Path, kind: str) -> list[tuple[int, Path]]:
    return sorted(
        (int(entry.name[len(kind) + 1 :]), entry)
        for entry in list_subfolders(folder)
        if re.fullmatch(rf"{kind}_\d+", entry.name)
    )


def _summary_of(path: Path, base: Path) -> ParsedFile:
    parsed = read_file(path, base)
    content = parsed.content.get("summary") if isinstance(parsed.content, dict) else None
    return ParsedFile(
        file=parsed.file, content=content if content is not None else {}, problem=parsed.problem
    )


def read_commands(metadata: ParsedFile) -> tuple[CacheCommand, ...]:
    """The commands of all trials in the order of their execution."""
    entries = metadata.value("command_output_files")
    texts = [str(entry.get("command", "")) for entry in entries if isinstance(entry, dict)] if entries else []
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
        options=MappingProxyType(
            {name.removeprefix("--"): value for name, value in _flags(words[program + 1 :]).items()}
        ),
    )


def _flags(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("-") and not _is_number(word):
            name, equals, value = word.partition("=")
            following = words[index + 1] if index + 1 < len(words) else "-"
            found[name] = value if equals else "" if following.startswith("-") else following
    return found


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()


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
    return figures | {LATENCY: max(rank.summary.number(*_RANK_LATENCY) for rank in of_option)}


def ranks_in_memory(ranks: tuple[RankResult, ...], option: int) -> Iterator[RankResult]:
    """The ranks that stored nothing: their tier in memory served everything."""
    for rank in ranks:
        if rank.option == option and rank.summary.has(*_STORED) and rank.summary.number(*_STORED) == 0:
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
    """Whether no rank's file is missing and no launch failed; rounds publish the latest such run."""
    failures = summary.content.get("trial_failures") if isinstance(summary.content, dict) else None
    return (
        not summary.problem
        and summary.has("options")
        and not (
            (summary.has("partial_failure") and summary.value("partial_failure") is not False) or failures
        )
    )
