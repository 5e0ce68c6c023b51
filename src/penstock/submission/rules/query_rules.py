"""Rules about key-value caches and vector search: what ran, on which ranks, and the figures.

The settings of a key-value cache are read from the commands that were executed, because the settings in the
metadata are the tool's defaults.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from penstock.submission.parsed_file import MissingFact
from penstock.submission.result_figures import LATENCY, SUMS, options_of, recompute_option, recompute_run
from penstock.submission.rules.rule import (
    METADATA,
    NAME,
    NEWEST,
    Case,
    Finding,
    Judge,
    Rule,
    Verdict,
    check,
    compare_stated,
    free_in_open,
    limit,
    not_checked,
    nothing,
    pass_if,
    require_datagen,
    require_runs,
)
from penstock.submission.rules.run_rules import recorded_overrides
from penstock.submission.rules.tree_rules import SOLUTION, require_description
from penstock.submission.tree_layout import SUMMARY, Benchmark

_CACHE: Final[Any] = {"editions": NEWEST, "benchmarks": (Benchmark.KV_CACHE,)}
_VECTORS: Final[Any] = {"editions": NEWEST, "benchmarks": (Benchmark.VECTOR_SEARCH,)}
_CLOSED_CACHE: Final[Any] = {**_CACHE, "unless": free_in_open}
_CLOSED_VECTORS: Final[Any] = {**_VECTORS, "unless": free_in_open}
_LATENCIES: Final = ("mean_latency_ms", "p95_latency_ms", "p99_latency_ms", "p999_latency_ms")
_CLOCK_TOLERANCE: Final = 1e-7
"""A double that counts seconds since 1970 is exact to a quarter of a microsecond."""
_PLACE: Final = re.compile(r"option_(\d+)/trial_(\d+)")
_NUM_PROCESSES: Final = ("-n", "-np", "--np", "--ntasks")
_NUMBER: Final = re.compile(r"-*\d+(\.\d*)?|-*\.\d+")
_RESTORE_SUMMARY: Final = "Restore the summary as the benchmark wrote it."


@dataclass(frozen=True, slots=True)
class CacheCommand:
    """A command that the tool executed for one trial of one option; flags without values have the value "".

    `num_processes` is 0 if the launcher's command does not state it.
    """

    option: int
    trial: int
    num_processes: int
    options: Mapping[str, str]


def _commands(case: Case) -> tuple[CacheCommand, ...]:
    """Return the commands of all trials, in the order of their execution."""
    metadata = case.run.metadata
    entries = metadata.parts("command_output_files").values()
    texts = [str(entry.value("command")) for entry in entries if entry.has("command")]
    commands = tuple(command for text in texts if (command := _parse_command(text)))
    if not commands:
        raise MissingFact("command_output_files names no command of a trial", where=metadata.file)
    return commands


def _parse_command(text: str) -> CacheCommand | None:
    place = _PLACE.search(text)
    try:
        words = shlex.split(text)
    except ValueError:  # cut off within quotes, so it is not a trial's command
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
    """Parse flags: ["--seed", "42", "--quiet", "--n=3"] becomes {--seed: 42, --quiet: "", --n: 3}."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            name, equals, value = word.partition("=")
            found[name] = value if equals else "" if following.startswith("-") else following
    return found


def _file_problems(case: Case) -> list[str]:
    """List problems: missing metadata, a missing summary, or a summary that has an older tool's name."""
    run, name = case.run, case.run.summary.file.rpartition("/")[2]
    if run.unlisted:
        raise MissingFact(run.unlisted, where=run.name)
    problems = [] if run.metadata.file != run.name else [run.metadata.problem]
    if run.summary.is_missing:
        problems.append(f"there is no {SUMMARY}")
    elif name.lower() != SUMMARY:
        problems.append(f"its summary is called {name}")
    return problems


def _losses(case: Case) -> list[str]:
    summary = case.run.summary
    problems = ["partial_failure is true"] if summary.boolean("partial_failure") else []
    for number, option in options_of(case.run.summary).items():
        if missing := option.content.get("missing_files") if isinstance(option.content, dict) else None:
            problems.append(f"option {number} lacks {len(missing)} files of ranks")
    if failures := summary.content.get("trial_failures"):
        problems.append(f"{len(failures)} launches failed")
    return problems


def _judge_table(case: Case) -> Iterator[Finding]:
    commands = _commands(case)
    for number, option in case.edition.kv_cache.options.items():
        wanted: dict[str, str | float] = {
            "model": option.model,
            "duration": option.duration_s,
            "gpu-mem-gb": option.gpu_gib,
            "cpu-mem-gb": option.cpu_gib,
            "max-concurrent-allocs": option.max_allocations,
            "generation-mode": option.generation,
        }
        own = [command for command in commands if command.option == int(number)]
        wrong = sorted(
            {
                f"--{name} is {command.options.get(name, 'not set')}, not {value}"
                for command in own
                for name, value in wanted.items()
                if not _agrees(command.options.get(name), value)
            }
        )
        yield pass_if(
            bool(own) and not wrong,
            evidence=case.run.metadata.file,
            value=f"{len(wrong)} differ" if own else "never ran",
            limit="0 differ",
            proof=f"option {number}: " + ("; ".join(wrong) or ("as in the table" if own else "it never ran")),
            fix="Repeat the run with the options of the table.",
        )


def _agrees(stated: str | None, wanted: str | float) -> bool:
    try:
        return stated == wanted if stated is None or isinstance(wanted, str) else float(stated) == wanted
    except ValueError:
        return False


def _judge_sequence(case: Case) -> Iterator[Finding]:
    metadata, limits, commands = case.run.metadata, case.edition.kv_cache, _commands(case)
    ran = [(command.option, command.trial) for command in commands]
    wanted = [
        (option, trial) for option in sorted(map(int, limits.options)) for trial in range(limits.trials)
    ]
    problems = [] if ran == wanted else [f"options and trials ran as {ran}"]
    seeds = {c.options.get("seed-base", c.options.get("seed", "")) for c in commands}
    if seeds != {str(limits.seed)}:
        problems.append(f"--seed-base is {', '.join(sorted(seeds))}, not {limits.seed}")
    delay = ("args", "inter_option_delay")  # if it is not stated, the tool uses the edition's
    if metadata.has(*delay) and (delay_s := metadata.number(*delay)) != limits.delay_s:
        problems.append(f"inter_option_delay is {delay_s:g}, not {limits.delay_s:g}")
    if metadata.has("args", "config"):
        problems.append("args.config names a configuration")
    yield pass_if(
        not problems,
        evidence=metadata.file,
        value=f"{len(ran)} trials",
        limit=f"{len(wanted)} trials",
        proof="; ".join(problems) or f"{len(ran)} trials in order, seed {limits.seed}",
        fix="Repeat the run without such options.",
    )


def _judge_ranks(case: Case) -> Iterator[Finding]:
    summary, metadata = case.run.summary, case.run.metadata
    ranks, each, hosts = (summary.integer(name) for name in ("total_ranks", "npernode", "host_count"))
    problems = [] if ranks == each * hosts else [f"{each} a host x {hosts} hosts != {ranks} ranks"]
    launched = {command.num_processes for command in _commands(case)} - {0}  # 0: not stated
    if metadata.has("num_processes"):
        launched.add(metadata.integer("num_processes"))
    if launched - {ranks}:
        problems.append(f"{', '.join(map(str, sorted(launched)))} processes were launched for {ranks} ranks")
    yield pass_if(
        not problems,
        value=f"{ranks} ranks",
        limit=f"{each} x {hosts}",
        proof="; ".join(problems) or f"{each} ranks on each of {hosts} hosts, {ranks} in all",
        fix="Repeat the run with as many ranks on every host.",
    )


def _users(case: Case) -> Iterator[dict[str, Any]]:
    commands = _commands(case)
    for number, option in case.edition.kv_cache.options.items():
        own = {c.options.get("num-users", "none") for c in commands if c.option == int(number)}
        yield {"number": number, "users": option.num_users, "stated": ", ".join(sorted(own))}


def _outputs(case: Case) -> list[str]:
    return [c.options.get("rank-output-base", c.options.get("output", "")) for c in _commands(case)]


def _shared_folders(case: Case) -> Iterator[str]:
    outputs = _outputs(case)
    caches = {c.options.get("rank-cache-base", c.options.get("cache-dir", "")) for c in _commands(case)}
    if len(set(outputs)) != len(outputs):
        yield "trials share a folder"
    if "" in caches:
        yield "--rank-cache-base is not set"
    if caches & set(outputs):
        yield "a cache lies where results are written"


def _judge_shared_folder(case: Case) -> Iterator[Finding]:
    summary, present = case.run.summary, len(case.run.ranks)
    hosts, ranks = summary.integer("host_count"), summary.integer("total_ranks")
    expected = ranks * sum(option.integer("trial_count") for option in options_of(case.run.summary).values())
    if hosts > 1 and not present:
        entries = case.run.metadata.value("command_output_files")
        if not any(".fs_probe" in str(entry) for entry in entries or ()):
            raise MissingFact("there is no file of a rank, and no probe of the folder", where=case.run.name)
        yield Finding(
            verdict=Verdict.PASS,
            evidence=case.run.metadata.file,
            proof="the tool probed the folder on all hosts",
        )
        return
    yield pass_if(
        hosts == 1 or present == expected,
        evidence=case.run.name,
        value=f"{present} files",
        limit=f"{expected} files",
        proof=f"{present} files of ranks are there, of {expected}",
        fix="Repeat the run with results where all hosts can write.",
        otherwise=Verdict.WARNING if summary.boolean("partial_failure") else Verdict.FAIL,
    )


def _figures(*names: str) -> Judge:
    """Make a judge that compares each option's figures with those computed from the ranks' reports."""

    def judge(case: Case) -> Iterator[Finding]:
        for number, option in options_of(case.run.summary).items():
            try:
                recomputed = recompute_option(case.run.ranks, number)
            except MissingFact as reason:
                yield not_checked(MissingFact(reason.what, where=case.run.name))
                continue
            for name in names:
                yield compare_stated(
                    f"option {number}, {name}",
                    option.number(name),
                    recomputed[name],
                    fix="Restore the files of the ranks, and aggregate them again.",
                    tolerance=case.edition.mean_tolerance,
                )

    return judge


def _judge_tiers(case: Case) -> Iterator[Finding]:
    entries = ("cache_stats", "storage_entries")
    for number, option in options_of(case.run.summary).items():
        stated = option.value("cpu_tier_ranks")
        in_memory = {
            rank
            for each, _, rank, summary in case.run.ranks
            if each == number and summary.has(*entries) and summary.number(*entries) == 0
        }
        num_in_memory = max(len(in_memory), len(stated) if isinstance(stated, list) else 0)
        ranks = option.integer("rank_count")
        yield pass_if(
            num_in_memory == 0,
            value=f"{num_in_memory} ranks",
            limit=f"fewer than {ranks} ranks",
            proof=f"option {number}: {num_in_memory} of {ranks} ranks stored nothing",
            fix="Repeat the run with less memory for the cache.",
            otherwise=Verdict.FAIL if num_in_memory >= ranks else Verdict.WARNING,
        )


def _missing_figures(case: Case) -> list[str]:
    options = options_of(case.run.summary)
    missing = [f"option {number}" for number in case.edition.kv_cache.options if int(number) not in options]
    missing += [
        f"option {number}: {name}"
        for number, option in options.items()
        for name in (*SUMS, LATENCY)
        if not option.has(name)
    ]
    return missing if case.run.summary.has("total_ranks") else [*missing, "total_ranks"]


def _judge_gateway(case: Case) -> Iterator[Finding]:
    folder, description = case.run.metadata.text("args", "cache_dir"), require_description(case)
    api = description.text(*SOLUTION, "architecture", "product_API")
    if "://" in folder:
        yield Finding(
            verdict=Verdict.FAIL,
            evidence=case.run.metadata.file,
            value=folder,
            limit="a path",
            proof=f"cache_dir is {folder}, which is not a path",
            fix="Repeat the run through a gateway that serves files.",
        )
    else:
        yield pass_if(
            api != "object",
            evidence=description.file,
            value=api,
            proof=f"cache_dir is {folder}, the product serves {api}s",
            fix="Let the submitter name the gateway and its mount options.",
            otherwise=Verdict.WARNING,
        )


def _extra_cache_settings(case: Case) -> list[str]:
    metadata = case.run.metadata
    flags = {name for command in _commands(case) for name in command.options}
    return [f"--{name}" for name in sorted(flags - case.edition.kv_cache.flags)] + [
        f"{'.'.join(path)} is {metadata.value(*path)!r:.60}"
        for path in (("args", "params"), ("override_parameters",))
        if metadata.has(*path) and metadata.value(*path)
    ]


def _judge_truth(case: Case) -> Iterator[Finding]:
    truth = case.run.ground_truth
    if truth.is_missing:
        yield Finding(
            verdict=Verdict.WARNING,
            proof="there is no result_verdict.json: nothing says what recall was measured against",
            fix="Let the reviewer ask how the ground truth was built.",
        )
        return
    is_ok, coverage = truth.boolean("flat_setup", "ok"), truth.number("flat_setup", "coverage")
    yield pass_if(
        is_ok and coverage == 1,
        value=f"{coverage:g}",
        limit="1",
        proof=f"flat_setup.ok is {str(is_ok).lower()}, its coverage {coverage:g}",
        fix="Build the ground truth from all vectors, and repeat the runs.",
    )


def _judge_backend(case: Case) -> Iterator[Finding]:
    here, first = (
        [
            str(run.metadata.value("args", key))
            for key in ("data_access_protocol", "storage_type")
            if run.metadata.has("args", key)
        ]
        for run in (case.run, case.result.run_dirs()[0])
    )
    if not here:
        raise MissingFact("there is no field args.data_access_protocol", where=case.run.metadata.file)
    yield pass_if(
        here == first or not first,
        evidence=case.run.metadata.file,
        value=", ".join(here),
        limit=", ".join(first),
        proof=f"it used {', '.join(here)}, the first run {', '.join(first) or 'does not say'}",
        fix="Repeat the runs on one storage.",
    )


def _unless_no_traffic(case: Case) -> str:
    aggregate = case.run.aggregate
    if aggregate.has("disk_io", "total_bytes_read"):
        return ""
    aggregate.value()
    return "it states no traffic"


def _vector_keys(case: Case) -> set[str]:
    return {key for _, keys in recorded_overrides(case.run.metadata) for key in keys}


def _judge_vector_means(case: Case) -> Iterator[Finding]:
    summary = case.run.summary
    for name, recomputed in recompute_run(case.run.aggregate).items():
        yield compare_stated(
            name,
            summary.number(name),
            recomputed,
            fix="Restore the files of the run as the benchmark wrote them.",
            tolerance=_CLOCK_TOLERANCE,
        )


RULES: Final = (
    nothing(
        id="kvcache.files",
        title="A run of a key-value cache has its metadata and its summary",
        **_CACHE,
        source="LEAF-01; tables are made of summary.json, and of runs that their metadata identify",
        formula="one *_metadata.json and summary.json; a summary under the old name is in no table",
        passes="summary.json, kv_cache_20260701_100000_metadata.json",
        fails="kvcache_run_summary_20260701_100000.json alone",
        problems=_file_problems,
        at=NAME,
        proof="both are there",
        fix=f"Restore the metadata; call the summary {SUMMARY}.",
    ),
    check(
        id="kvcache.runs",
        title="A result of a key-value cache is one run",
        **_CACHE,
        each="result",
        source="1.3; of several runs the round published the latest without errors",
        formula="one result directory in run/ (else a warning that names the one that counts)",
        passes="run/20260701_100000/",
        fails="run/20260701_100000/ and run/20260702_100000/ (a warning)",
        facts=lambda case: {
            "counted": require_runs(case.result)[0].name,
            "names": ", ".join(folder.name for folder in case.result.location.run_folders),
            "number": len(case.result.location.run_folders),
        },
        holds=lambda it: it.number == 1,
        show=("{number}", "1"),
        proof="{names}: {counted} counts",
        fix="Submit the one run that counts, or give each a system of its own.",
        otherwise=Verdict.WARNING,
    ),
    nothing(
        id="kvcache.complete",
        title="No rank of a key-value cache is missing, and no trial failed",
        **_CACHE,
        source="6.3.4; the round published a run that had lost 45 files of ranks",
        formula="partial_failure is false, missing_files and trial_failures are empty (else a warning)",
        passes="partial_failure false",
        fails="partial_failure true, 45 missing files (a warning)",
        problems=_losses,
        proof="all ranks reported in all trials",
        fix="Repeat the run; its means leave out the lost ranks.",
        otherwise=Verdict.WARNING,
    ),
    Rule(
        id="kvcache.table",
        title="In CLOSED each option ran with the values of the table",
        **_CLOSED_CACHE,
        source="6.3.1.1, table KVCache-1",
        formula="model, duration, memory tiers, allocations and generation of every command == the edition's",
        passes="option 1: --model llama3.1-8b --duration 300 --gpu-mem-gb 0 --cpu-mem-gb 0",
        fails="option 1: --cpu-mem-gb 32",
        judge=_judge_table,
    ),
    Rule(
        id="kvcache.sequence",
        title="In CLOSED the options ran in order, in three trials each, with the edition's seed and delay",
        **_CLOSED_CACHE,
        source="6.3.2.1",
        formula=(
            "commands are options 1, 2, 3 with trials 0, 1, 2; --seed-base and inter_option_delay are the "
            "edition's; no args.config"
        ),
        passes="nine commands in order, --seed-base 42, inter_option_delay 90",
        fails="two trials of option 3",
        judge=_judge_sequence,
    ),
    limit(
        id="kvcache.autoscaling",
        title="In CLOSED the number of users is not scaled automatically",
        **_CLOSED_CACHE,
        source="6.3.2.2, by the commands: the metadata have the tool's default, which its options do not use",
        formula="no command has --enable-autoscaling",
        passes="... --generation-mode none",
        fails="... --enable-autoscaling",
        fact=lambda case: sum("enable-autoscaling" in command.options for command in _commands(case)),
        limit=0,
        at=METADATA,
        show=("{fact} commands", "{limit} commands"),
        proof="{fact} commands have --enable-autoscaling",
        fix="Repeat the run without autoscaling.",
    ),
    Rule(
        id="kvcache.ranks",
        title="The ranks are spread evenly over the hosts, and every trial used all of them",
        **_CACHE,
        source="6.3.3.1",
        formula="total_ranks == npernode x host_count == num_processes == -n of every command",
        passes="2 ranks on each of 16 hosts, -n 32",
        fails="2 ranks on each of 16 hosts, total_ranks 30",
        judge=_judge_ranks,
    ),
    check(
        id="kvcache.users",
        title="In CLOSED every rank serves all users of its option",
        **_CLOSED_CACHE,
        source="6.3.3.2",
        formula="--num-users of every command == the option's, which are not divided among ranks",
        passes="option 1 on 32 ranks: --num-users 200",
        fails="option 1 on 2 ranks: --num-users 100",
        facts=_users,
        holds=lambda it: it.stated == str(it.users),
        at=METADATA,
        show=("{stated}", "{users}"),
        proof=lambda it: f"option {it.number}: {it.stated or 'no'} users a rank",
        fix="Repeat the run with the users of the table on every rank.",
    ),
    nothing(
        id="kvcache.isolation",
        title="Every trial writes to its own folder, and every rank to its own cache",
        **_CACHE,
        source="6.3.3.3",
        formula="--rank-output-base differs in all commands; --rank-cache-base is set and is none of them",
        passes="--rank-output-base .../option_1/trial_0 --rank-cache-base /mnt/cache",
        fails="two trials with one --rank-output-base",
        problems=_shared_folders,
        at=METADATA,
        show=(
            lambda it: f"{len(set(_outputs(it.case)))} folders",
            lambda it: f"{len(_outputs(it.case))} trials",
        ),
        proof=lambda it: f"{len(_outputs(it.case))} trials in as many folders",
        fix="Repeat the run as the tool launches it.",
    ),
    Rule(
        id="kvcache.shared",
        title="All ranks wrote to one results folder",
        **_CACHE,
        source="6.3.3.4",
        formula="one host, or the files of all ranks of all trials are there, or the tool probed the folder",
        passes="32 ranks x 3 options x 3 trials: 288 files",
        fails="16 hosts, and the files of rank 0 alone",
        judge=_judge_shared_folder,
    ),
    Rule(
        id="kvcache.bandwidth",
        title="The bandwidths of an option are sums over its ranks",
        **_CACHE,
        source="6.3.4.1",
        formula="mean over trials of the sum over ranks of tier_storage_*_bandwidth_gbps == stated",
        passes="two ranks with 1.5 and 2.5 GiB/s in each trial, aggregated 4.0",
        fails="the same, aggregated 4.4",
        judge=_figures(*tuple(SUMS)[:2]),
    ),
    Rule(
        id="kvcache.tokens",
        title="The tokens per second of an option are sums over its ranks",
        **_CACHE,
        source="6.3.4.2",
        formula="mean over trials of the sum over ranks of both rates of tokens == stated",
        passes="two ranks with 100 and 110 tokens/s, aggregated 210",
        fails="the same, aggregated 220",
        judge=_figures(*tuple(SUMS)[2:]),
    ),
    Rule(
        id="kvcache.latency",
        title="The latency of an option is the largest of its ranks",
        **_CACHE,
        source="6.3.4.3",
        formula="max over ranks and trials of storage_io_latency_ms.p95 == stated",
        passes="ranks with 10 and 15 ms, aggregated 15",
        fails="the same, aggregated 12.5",
        judge=_figures(LATENCY),
    ),
    Rule(
        id="kvcache.tiers",
        title="Not all ranks of an option were served by memory alone",
        **_CACHE,
        source="6.3.4.4",
        formula="cpu_tier_ranks, or ranks with storage_entries 0, < all ranks; some are a warning",
        passes="storage_entries 4,000 on every rank",
        fails="storage_entries 0 on every rank",
        judge=_judge_tiers,
    ),
    nothing(
        id="kvcache.headline",
        title="Each option states its bandwidths, tokens, latency and ranks",
        **_CACHE,
        source="6.3.4.5",
        formula="the figures of all options of the edition are numbers, and total_ranks is one",
        passes="options 1, 2 and 3 with all figures",
        fails="options 1 and 2 alone",
        problems=_missing_figures,
        show=("{number} missing", "0 missing"),
        proof="all figures are there",
        bad="missing: {}",
        join=", ".join,
        fix="Repeat the run, to its end.",
    ),
    check(
        id="kvcache.traffic",
        title="Each option wrote to its storage and read from it",
        **_CACHE,
        source="6.6.2: an option that keeps all in memory measures no storage",
        formula="aggregated_read_bandwidth_gbps and aggregated_write_bandwidth_gbps > 0",
        passes="151.7 GiB/s read, 39.1 GiB/s written",
        fails="0 GiB/s read",
        facts=lambda case: (
            {
                "number": number,
                "read": option.number("aggregated_read_bandwidth_gbps"),
                "written": option.number("aggregated_write_bandwidth_gbps"),
            }
            for number, option in options_of(case.run.summary).items()
        ),
        holds=lambda it: it.read > 0 and it.written > 0,
        show=("{read:g} and {written:g} GiB/s", "more than 0 GiB/s"),
        proof="option {number} read {read:g} GiB/s and wrote {written:g} GiB/s",
        fix="Repeat the run with less memory for the cache.",
    ),
    Rule(
        id="kvcache.gateway",
        title="A key-value cache on object storage is accessed through files",
        **_CACHE,
        source="6.5.1, 6.5.2",
        formula=(
            "cache_dir is a path; over an object storage a warning, to have gateway and mount options named"
        ),
        passes="cache_dir /mnt/cache, product_API file",
        fails="cache_dir s3://bucket/cache",
        judge=_judge_gateway,
    ),
    nothing(
        id="kvcache.closed",
        title="In CLOSED only hosts, ranks and paths are the submitter's choice",
        **_CLOSED_CACHE,
        source="6.6.1",
        formula="every command has only the edition's flags; args.params and override_parameters are empty",
        passes="--model --num-users ... --rank-cache-base",
        fails="--performance-profile latency",
        problems=_extra_cache_settings,
        at=METADATA,
        proof="only hosts, ranks and paths are set",
        bad="set beyond the table: {}",
        join=", ".join,
        fix="Submit it as OPEN, or repeat the run without them.",
    ),
    limit(
        id="vectors.runs",
        title="An index has exactly the number of runs that the edition requires",
        **_VECTORS,
        each="result",
        source="5.3.1",
        formula="number of runs == the edition's",
        passes="five result directories in run/",
        fails="four result directories in run/",
        fact=lambda case: len(case.result.runs),
        limit=lambda case: case.edition.vectors.num_runs,
        proof="{fact} runs {sign} {limit}",
        fix="Submit all runs of the index.",
    ),
    nothing(
        id="vectors.files",
        title="A run of vector search has its metadata and its figures",
        **_VECTORS,
        source="LEAF-01; without summary.json tables are made of the figures over all ranks",
        formula=(
            "one *_metadata.json; summary.json (else a warning), or the figures over all ranks (else fail)"
        ),
        passes="summary.json, vector_database_20260701_100000_metadata.json",
        fails="neither summary.json nor vdb_multi_node_summary.json",
        problems=_file_problems,
        at=NAME,
        proof="both are there",
        fix="Submit the run's whole output folder.",
        otherwise=lambda it: (
            Verdict.FAIL
            if it.case.run.metadata.file == it.case.name or it.case.run.aggregate.is_missing
            else Verdict.WARNING
        ),
    ),
    check(
        id="vectors.scale",
        title="A run states how many vectors of which dimension it searched",
        **_VECTORS,
        source="5.1.1, whose table of scales does not exist: only that both are there",
        formula="num_vectors and dimension of the summary are positive",
        passes="1,000,000 vectors of 1,536 dimensions",
        fails="num_vectors 0",
        facts=lambda case: {name: case.run.summary.integer(name) for name in ("num_vectors", "dimension")},
        holds=lambda it: it.num_vectors > 0 and it.dimension > 0,
        show=("{num_vectors:,} x {dimension:,}", "more than 0"),
        proof="{num_vectors:,} vectors of {dimension:,} dimensions",
        fix="Repeat the run on vectors.",
    ),
    check(
        id="vectors.dimension",
        title="The searched vectors have the dimension of the loaded ones",
        **_VECTORS,
        source="5.1.2",
        formula="dimension of the loading == dimension of the run == args.vector_dim",
        passes="1,536 loaded, 1,536 searched",
        fails="1,536 loaded, 768 searched",
        facts=lambda case: {
            "loaded": require_datagen(case).summary.integer("dimension"),
            "searched": case.run.summary.integer("dimension"),
            "asked": case.run.metadata.integer("args", "vector_dim"),
        },
        holds=lambda it: it.loaded == it.searched == it.asked,
        show=("{searched}", "{loaded}"),
        proof="{loaded} dimensions loaded, {searched} searched, {asked} asked for",
        fix="Search the vectors that were loaded.",
    ),
    check(
        id="vectors.inserted",
        title="All vectors were inserted",
        **_VECTORS,
        source="5.2.1, as its text says: equal",
        formula="inserted_vectors == num_vectors, in the loading and in the run",
        passes="1,000,000 of 1,000,000",
        fails="999,000 of 1,000,000",
        facts=lambda case: (
            {
                "file": summary.file,
                "inserted": summary.integer("inserted_vectors"),
                "asked": summary.integer("num_vectors"),
            }
            for summary in (require_datagen(case).summary, case.run.summary)
        ),
        holds=lambda it: it.inserted == it.asked,
        show=("{inserted:,}", "{asked:,}"),
        proof="{inserted:,} vectors were inserted, of {asked:,}",
        fix="Load all vectors, and repeat the runs.",
    ),
    check(
        id="vectors.index",
        title="The searched index is the one that was built, and the one that names the folder",
        **_VECTORS,
        source="5.2.2",
        formula="index_type of the loading == index_type of the run == the folder's name, in any case",
        passes="DISKANN built, DISKANN searched, milvus/DISKANN/",
        fails="DISKANN built, HNSW searched",
        facts=lambda case: {
            "built": require_datagen(case).summary.text("index_type").upper(),
            "searched": case.run.summary.text("index_type").upper(),
            "folder": case.result.location.model.upper(),
        },
        holds=lambda it: it.built == it.searched == it.folder,
        show=("{searched}", "{built}"),
        proof="{built} was built, {searched} searched, the folder is called {folder}",
        fix="Search the index that was built, and name the folder by it.",
    ),
    check(
        id="vectors.recall",
        title="A run found some of the nearest vectors",
        **_VECTORS,
        source="5.3.2, whose table of minimum recalls does not exist",
        formula="0 < recall <= 1, and == the mean over all queries",
        passes="recall 0.95",
        fails="recall 0.0",
        facts=lambda case: {
            "recall": case.run.summary.number("recall"),
            "mean": case.run.aggregate.number("recall", "mean_recall"),
            "tolerance": case.edition.mean_tolerance,
        },
        holds=lambda it: 0 < it.recall <= 1 and math.isclose(it.recall, it.mean, rel_tol=it.tolerance),
        show=("{recall:g}", "more than 0"),
        proof="recall is {recall:g}, the mean over all queries {mean:g}",
        fix="Build the ground truth from the vectors that were loaded, and repeat the runs.",
    ),
    check(
        id="vectors.queries",
        title="A run states how many queries it made",
        **_VECTORS,
        source="5.3.3, whose table of minimum numbers does not exist",
        formula="query_count > 0, and == throughput_qps x total_time_seconds to 1e-6",
        passes="3,607,200 queries in 62.6 s, 57,620 a second",
        fails="1,000 queries in 62.6 s, 57,620 a second",
        facts=lambda case: {
            "queries": case.run.summary.number("query_count"),
            "rate": case.run.summary.number("throughput_qps"),
            "seconds": case.run.summary.number("total_time_seconds"),
            "product": case.run.summary.number("throughput_qps")
            * case.run.summary.number("total_time_seconds"),
        },
        holds=lambda it: it.queries > 0 and math.isclose(it.queries, it.product, rel_tol=1e-6),
        show=("{queries:,.0f}", "{product:,.0f}"),
        proof="{queries:,.0f} queries; {rate:g} a second x {seconds:g} s = {product:,.0f}",
        fix=_RESTORE_SUMMARY,
    ),
    check(
        id="vectors.figures",
        title="A run states its rate and its latencies",
        **_VECTORS,
        source="5.3.4",
        formula="throughput_qps and four latencies are positive; p95 <= p99 <= p999",
        passes="6.3 ms on average, 19.6, 107.4 and 160.1 ms",
        fails="p99 107 ms, p999 16 ms",
        facts=lambda case: {
            "rate": case.run.summary.number("throughput_qps"),
            "latencies": [case.run.summary.number(name) for name in _LATENCIES],
            "listed": ", ".join(f"{case.run.summary.number(name):g}" for name in _LATENCIES),
        },
        holds=lambda it: min(it.rate, *it.latencies) > 0 and it.latencies[1:] == sorted(it.latencies[1:]),
        show=("{listed}", "in order"),
        proof="{rate:g} queries a second; mean, p95, p99, p999: {listed} ms",
        fix=_RESTORE_SUMMARY,
    ),
    Rule(
        id="vectors.truth",
        title="The ground truth covers all vectors",
        **_VECTORS,
        source="5.3.5; older tools wrote no result_verdict.json, which is a warning",
        formula="result_verdict.json: flat_setup.ok is true and its coverage is 1",
        passes="coverage 1.0",
        fails="coverage 0.01",
        at=attrgetter("run.ground_truth.file"),
        judge=_judge_truth,
    ),
    Rule(
        id="vectors.backend",
        title="All runs of an index used the same storage",
        **_VECTORS,
        source="5.5.1",
        formula="data_access_protocol and storage_type of the run == the first run's",
        passes="file and local_fs in all runs",
        fails="object in one run, file in the others",
        judge=_judge_backend,
    ),
    limit(
        id="vectors.engine",
        title="In CLOSED the engine is one of the edition's",
        **_CLOSED_VECTORS,
        source="5.6.2",
        formula="args.vdb_engine is in the edition's list",
        passes="milvus",
        fails="pgvector",
        fact=lambda case: case.run.metadata.text("args", "vdb_engine").lower(),
        compare="in",
        limit=lambda case: sorted(case.edition.vectors.engines),
        at=METADATA,
        proof="the engine is {fact}",
        fix="Submit it as OPEN.",
    ),
    limit(
        id="vectors.closed_index",
        title="In CLOSED the index is one of the edition's",
        **_CLOSED_VECTORS,
        source="5.6.3",
        formula="index_type is in the edition's list",
        passes="DISKANN",
        fails="IVF_FLAT",
        fact=lambda case: case.run.summary.text("index_type").upper(),
        compare="in",
        limit=lambda case: sorted(case.edition.vectors.closed_indexes),
        proof="the index is {fact}",
        fix="Submit it as OPEN.",
    ),
    nothing(
        id="vectors.parameters",
        title="In CLOSED only keys that the division leaves free are set",
        **_CLOSED_VECTORS,
        source="5.6.4",
        formula="every key of override_parameters and args.params is in the edition's list",
        passes="index.M=64",
        fails="dataset.distribution=zipfian",
        problems=lambda case: sorted(_vector_keys(case) - case.edition.vectors.closed_keys),
        at=METADATA,
        proof=lambda it: f"{len(_vector_keys(it.case))} keys, all are free",
        bad="set beyond the list: {}",
        join=", ".join,
        fix="Submit it as OPEN, or repeat the runs without them.",
    ),
    check(
        id="vectors.open",
        title="In OPEN the index is one that the edition lists",
        **_VECTORS,
        source="5.6.5, a recommendation",
        formula="the index is in one of the edition's lists (else a warning)",
        passes="IVF_FLAT in OPEN",
        fails="TREE in OPEN (a warning)",
        facts=lambda case: {
            "index": case.run.summary.text("index_type").upper(),
            "known": ", ".join(
                sorted(case.edition.vectors.closed_indexes | case.edition.vectors.open_indexes)
            ),
        },
        holds=lambda it: it.case.is_closed or it.index in it.known.split(", "),
        show=("{index}", "{known}"),
        proof=lambda it: "this is CLOSED" if it.case.is_closed else f"the index is {it.index}",
        fix="Let the reviewer see what this index is.",
        otherwise=Verdict.WARNING,
    ),
    Rule(
        id="vectors.means",
        title="The rate of a run is the sum over its ranks",
        **_VECTORS,
        source="ours: a stated rate is never trusted",
        formula="sum of the ranks' queries / (last end - first start) == throughput_qps, to the clock's 1e-7",
        passes="4 ranks with 900,000 queries each in 62.6 s, 57,500 a second",
        fails="the same, 63,000 a second",
        judge=_judge_vector_means,
    ),
    limit(
        id="vectors.traffic",
        title="The storage was read while vectors were searched",
        **_VECTORS,
        source="ours: no rule asks for it, and an index that fits into memory measures none",
        formula="disk_io.total_bytes_read > 0 where it applies to the storage under test (else a warning)",
        passes="total_bytes_read 5,000,000,000",
        fails="total_bytes_read 0 (a warning)",
        unless=_unless_no_traffic,
        fact=lambda case: case.run.aggregate.integer("disk_io", "total_bytes_read"),
        compare=">",
        limit=0,
        at=attrgetter("run.aggregate.file"),
        show=("{fact:,} B", "more than {limit} B"),
        proof="the hosts' own devices read {fact:,} B",
        fix="Let the reviewer ask for the traffic at the storage.",
        otherwise=Verdict.WARNING,
    ),
)
