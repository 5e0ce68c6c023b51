"""Rules about key-value caches: what each option ran, on which ranks, and what their files come to.

Settings are those of the commands that were executed; the metadata's own are the tool's defaults.
"""

import math
from collections.abc import Iterator
from typing import Final

from penstock.submission import kv_cache_runs
from penstock.submission.edition import CacheOption
from penstock.submission.finding import Finding, Verdict, not_checked, pass_if, violation
from penstock.submission.kv_cache_runs import CacheCommand, read_commands
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.rules import rule, system_rules
from penstock.submission.tree_layout import SUMMARY, Benchmark

KV_CACHE: Final[rule.Scope] = {"editions": rule.NEWEST, "benchmarks": (Benchmark.KV_CACHE,)}


def _options(case: rule.RunCase) -> list[tuple[int, ParsedFile]]:
    return sorted(kv_cache_runs.options_of(case.run.summary).items())


def _wanted(option: CacheOption) -> dict[str, str | float]:
    """What a command says for an option of the edition."""
    return {
        "model": option.model,
        "duration": option.duration_s,
        "gpu-mem-gb": option.gpu_gib,
        "cpu-mem-gb": option.cpu_gib,
        "max-concurrent-allocs": option.max_allocations,
        "generation-mode": option.generation,
    }


def _is_set(command: CacheCommand, name: str, wanted: str | float) -> bool:
    stated = command.options.get(name)
    if stated is None or isinstance(wanted, str):
        return stated == wanted
    try:
        return float(stated) == wanted
    except ValueError:
        return False


@rule.run_rule(
    id="kvcache.files",
    title="A run of a key-value cache has its metadata and its summary",
    **KV_CACHE,
    source="LEAF-01; tables are made of summary.json, and of runs that their metadata identify",
    formula="one *_metadata.json and summary.json; a summary under the old name is in no table",
    passes="summary.json, kv_cache_20260701_100000_metadata.json",
    fails="kvcache_run_summary_20260701_100000.json alone",
)
def _check_files(case: rule.RunCase) -> Iterator[Finding]:
    run, name = case.run, case.run.summary.file.rpartition("/")[2]
    if run.unlisted:
        raise MissingFact(run.unlisted, where=run.name)
    problems = [] if run.metadata.file != run.name else [run.metadata.problem]
    if run.summary.is_missing:
        problems.append(f"there is no {SUMMARY}")
    elif name.lower() != SUMMARY:
        problems.append(f"its summary is called {name}")
    yield pass_if(
        not problems,
        evidence=run.name,
        value=len(problems),
        limit=0,
        proof="; ".join(problems) or "both are there",
        fix=f"Restore the metadata; call the summary {SUMMARY}.",
    )


@rule.result_rule(
    id="kvcache.runs",
    title="A result of a key-value cache is one run",
    **KV_CACHE,
    source="1.3; of several runs the round published the latest without errors",
    formula="one result directory in run/ (else a warning that names the one that counts)",
    passes="run/20260701_100000/",
    fails="run/20260701_100000/ and run/20260702_100000/ (a warning)",
)
def _check_runs(case: rule.ResultCase) -> Iterator[Finding]:
    rule.require_runs(case.result)
    names = [folder.name for folder in case.result.location.run_folders]
    counted = case.result.runs[0].name
    yield pass_if(
        len(names) == 1,
        evidence=case.result.name,
        value=len(names),
        limit=1,
        proof=f"{', '.join(names)}: {counted} counts",
        fix="Hand in the one run that counts, or give each a system of its own.",
        otherwise=Verdict.WARNING,
    )


@rule.run_rule(
    id="kvcache.complete",
    title="No rank of a key-value cache is missing, and no trial failed",
    **KV_CACHE,
    source="6.3.4; the round published a run that had lost 45 files of ranks",
    formula="partial_failure is false, missing_files and trial_failures are empty (else a warning)",
    passes="partial_failure false",
    fails="partial_failure true, 45 missing files (a warning)",
)
def _check_complete(case: rule.RunCase) -> Iterator[Finding]:
    summary = case.run.summary
    problems = ["partial_failure is true"] if summary.boolean("partial_failure") else []
    for number, option in _options(case):
        if missing := option.content.get("missing_files") if isinstance(option.content, dict) else None:
            problems.append(f"option {number} lacks {len(missing)} files of ranks")
    if failures := summary.content.get("trial_failures"):
        problems.append(f"{len(failures)} launches failed")
    yield pass_if(
        not problems,
        evidence=summary.file,
        value=len(problems),
        limit=0,
        proof="; ".join(problems) or "all ranks reported in all trials",
        fix="Repeat the run; its means are those of the ranks that are left.",
        otherwise=Verdict.WARNING,
    )


@rule.run_rule(
    id="kvcache.table",
    title="In CLOSED each option ran with the values of the table",
    **KV_CACHE,
    source="6.3.1.1, table KVCache-1",
    formula="model, duration, memory tiers, allocations and generation of every command == the edition's",
    passes="option 1: --model llama3.1-8b --duration 300 --gpu-mem-gb 0 --cpu-mem-gb 0",
    fails="option 1: --cpu-mem-gb 32",
    not_applicable_if=rule.free_in_open,
)
def _check_table(case: rule.RunCase) -> Iterator[Finding]:
    commands, options = read_commands(case.run.metadata), case.kv_cache.options
    for number, option in options.items():
        wrong = sorted(
            {
                f"--{name} is {command.options.get(name, 'not set')}, not {wanted}"
                for command in commands
                if command.option == int(number)
                for name, wanted in _wanted(option).items()
                if not _is_set(command, name, wanted)
            }
        )
        has_run = any(command.option == int(number) for command in commands)
        yield pass_if(
            has_run and not wrong,
            evidence=case.run.metadata.file,
            value=f"{len(wrong)} differ" if has_run else "never ran",
            limit="0 differ",
            proof=f"option {number}: "
            + ("; ".join(wrong) or ("as in the table" if has_run else "it never ran")),
            fix="Repeat the run with the options of the table.",
        )


@rule.run_rule(
    id="kvcache.sequence",
    title="In CLOSED the options ran in their order, each in three trials, with the edition's seed and delay",
    **KV_CACHE,
    source="6.3.2.1",
    formula=(
        "commands are options 1, 2, 3 with trials 0, 1, 2; --seed-base and inter_option_delay are the "
        "edition's; no configuration of the submitter's"
    ),
    passes="nine commands in order, --seed-base 42, inter_option_delay 90",
    fails="two trials of option 3",
    not_applicable_if=rule.free_in_open,
)
def _check_sequence(case: rule.RunCase) -> Iterator[Finding]:
    metadata, limits = case.run.metadata, case.kv_cache
    commands = read_commands(metadata)
    ran = [(command.option, command.trial) for command in commands]
    wanted = [
        (option, trial) for option in sorted(map(int, limits.options)) for trial in range(limits.trials)
    ]
    problems = [] if ran == wanted else [f"options and trials ran as {ran}"]
    seeds = {c.options.get("seed-base", c.options.get("seed", "")) for c in commands}
    if seeds != {str(limits.seed)}:
        problems.append(f"--seed-base is {', '.join(sorted(seeds))}, not {limits.seed}")
    delay = ("args", "inter_option_delay")  # where it is not stated, the tool takes the edition's
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


@rule.run_rule(
    id="kvcache.autoscaling",
    title="In CLOSED nothing scales the users",
    **KV_CACHE,
    source="6.3.2.2, by the commands: the metadata have the tool's default, which its options do not use",
    formula="no command has --enable-autoscaling",
    passes="... --generation-mode none",
    fails="... --enable-autoscaling",
    not_applicable_if=rule.free_in_open,
)
def _check_autoscaling(case: rule.RunCase) -> Iterator[Finding]:
    scaled = [
        command for command in read_commands(case.run.metadata) if "enable-autoscaling" in command.options
    ]
    yield pass_if(
        not scaled,
        evidence=case.run.metadata.file,
        value=f"{len(scaled)} commands",
        limit="0 commands",
        proof=f"{len(scaled)} commands have --enable-autoscaling",
        fix="Repeat the run without autoscaling.",
    )


@rule.run_rule(
    id="kvcache.ranks",
    title="The ranks are spread evenly over the hosts, and every trial used all of them",
    **KV_CACHE,
    source="6.3.3.1",
    formula="total_ranks == npernode x host_count == num_processes == -n of every command",
    passes="2 ranks on each of 16 hosts, -n 32",
    fails="2 ranks on each of 16 hosts, total_ranks 30",
)
def _check_ranks(case: rule.RunCase) -> Iterator[Finding]:
    summary, metadata = case.run.summary, case.run.metadata
    ranks, each, hosts = (summary.integer(name) for name in ("total_ranks", "npernode", "host_count"))
    problems = [] if ranks == each * hosts else [f"{each} a host x {hosts} hosts != {ranks} ranks"]
    launched = {command.num_processes for command in read_commands(metadata)} - {0}
    if metadata.has("num_processes"):
        launched.add(metadata.integer("num_processes"))
    if launched - {ranks}:
        problems.append(f"{', '.join(map(str, sorted(launched)))} processes were launched for {ranks} ranks")
    yield pass_if(
        not problems,
        evidence=summary.file,
        value=f"{ranks} ranks",
        limit=f"{each} x {hosts}",
        proof="; ".join(problems) or f"{each} ranks on each of {hosts} hosts, {ranks} in all",
        fix="Repeat the run with as many ranks on every host.",
    )


@rule.run_rule(
    id="kvcache.users",
    title="In CLOSED every rank serves all users of its option",
    **KV_CACHE,
    source="6.3.3.2",
    formula="--num-users of every command == the option's, which are not divided among ranks",
    passes="option 1 on 32 ranks: --num-users 200",
    fails="option 1 on 2 ranks: --num-users 100",
    not_applicable_if=rule.free_in_open,
)
def _check_users(case: rule.RunCase) -> Iterator[Finding]:
    commands = read_commands(case.run.metadata)
    for number, option in case.kv_cache.options.items():
        stated = {c.options.get("num-users", "none") for c in commands if c.option == int(number)}
        yield pass_if(
            stated == {str(option.num_users)},
            evidence=case.run.metadata.file,
            value=", ".join(sorted(stated)),
            limit=option.num_users,
            proof=f"option {number}: {', '.join(sorted(stated)) or 'no'} users a rank",
            fix="Repeat the run with the users of the table on every rank.",
        )


@rule.run_rule(
    id="kvcache.isolation",
    title="Every trial writes to a folder of its own, and every rank to its own cache",
    **KV_CACHE,
    source="6.3.3.3",
    formula=(
        "--rank-output-base differs in all commands; --rank-cache-base is set and is no --rank-output-base"
    ),
    passes="--rank-output-base .../option_1/trial_0 --rank-cache-base /mnt/cache",
    fails="two trials with one --rank-output-base",
)
def _check_isolation(case: rule.RunCase) -> Iterator[Finding]:
    commands = read_commands(case.run.metadata)
    outputs = [c.options.get("rank-output-base", c.options.get("output", "")) for c in commands]
    caches = {c.options.get("rank-cache-base", c.options.get("cache-dir", "")) for c in commands}
    problems = [] if len(set(outputs)) == len(outputs) else ["trials share a folder"]
    if "" in caches:
        problems.append("--rank-cache-base is not set")
    if caches & set(outputs):
        problems.append("a cache lies where results are written")
    yield pass_if(
        not problems,
        evidence=case.run.metadata.file,
        value=f"{len(set(outputs))} folders",
        limit=f"{len(outputs)} trials",
        proof="; ".join(problems) or f"{len(outputs)} trials in as many folders",
        fix="Repeat the run as the tool launches it.",
    )


@rule.run_rule(
    id="kvcache.shared",
    title="All ranks wrote to one results folder",
    **KV_CACHE,
    source="6.3.3.4",
    formula=(
        "one host, or the files of all ranks of all trials are there, or the tool's probe of the folder ran"
    ),
    passes="32 ranks x 3 options x 3 trials: 288 files",
    fails="16 hosts, and the files of rank 0 alone",
)
def _check_shared(case: rule.RunCase) -> Iterator[Finding]:
    summary = case.run.summary
    hosts, ranks = summary.integer("host_count"), summary.integer("total_ranks")
    expected = ranks * sum(option.integer("trial_count") for _, option in _options(case))
    there = len(case.run.ranks)
    if hosts > 1 and not there:
        entries = case.run.metadata.value("command_output_files")
        is_probed = any(".fs_probe" in str(entry) for entry in entries or ())
        if not is_probed:
            raise MissingFact("there is no file of a rank, and no probe of the folder", where=case.run.name)
        yield Finding(
            verdict=Verdict.PASS,
            evidence=case.run.metadata.file,
            proof="the tool probed the folder on all hosts",
        )
        return
    yield pass_if(
        hosts == 1 or there == expected,
        evidence=case.run.name,
        value=f"{there} files",
        limit=f"{expected} files",
        proof=f"{there} files of ranks are there, of {expected}",
        fix="Repeat the run with results where all hosts can write.",
        otherwise=Verdict.WARNING if summary.boolean("partial_failure") else Verdict.FAIL,
    )


def _compare_figures(case: rule.RunCase, names: tuple[str, ...]) -> Iterator[Finding]:
    tolerance = case.edition.means.relative_tolerance
    for number, option in _options(case):
        try:
            recomputed = kv_cache_runs.recompute_option(case.run.ranks, number)
        except MissingFact as reason:
            yield not_checked(MissingFact(reason.what, where=case.run.name))
            continue
        for name in names:
            stated = option.number(name)
            holds = math.isclose(stated, recomputed[name], rel_tol=tolerance, abs_tol=tolerance)
            yield pass_if(
                holds,
                evidence=option.file,
                value=repr(stated),
                limit=repr(recomputed[name]),
                proof=(
                    f"option {number}, {name}: stated {stated!r} {'==' if holds else '!='} recomputed "
                    f"{recomputed[name]!r}"
                ),
                fix="Restore the files of the ranks, and aggregate them again.",
            )


@rule.run_rule(
    id="kvcache.bandwidth",
    title="The bandwidths of an option are those of its ranks",
    **KV_CACHE,
    source="6.3.4.1",
    formula="mean over trials of the sum over ranks of tier_storage_{read,write}_bandwidth_gbps == stated",
    passes="two ranks with 1.5 and 2.5 GiB/s in each trial, aggregated 4.0",
    fails="the same, aggregated 4.4",
)
def _check_bandwidth(case: rule.RunCase) -> Iterator[Finding]:
    yield from _compare_figures(case, tuple(kv_cache_runs.SUMS)[:2])


@rule.run_rule(
    id="kvcache.tokens",
    title="The tokens per second of an option are those of its ranks",
    **KV_CACHE,
    source="6.3.4.2",
    formula="mean over trials of the sum over ranks of both rates of tokens == stated",
    passes="two ranks with 100 and 110 tokens/s, aggregated 210",
    fails="the same, aggregated 220",
)
def _check_tokens(case: rule.RunCase) -> Iterator[Finding]:
    yield from _compare_figures(case, tuple(kv_cache_runs.SUMS)[2:])


@rule.run_rule(
    id="kvcache.latency",
    title="The latency of an option is the largest of its ranks",
    **KV_CACHE,
    source="6.3.4.3",
    formula="max over ranks and trials of storage_io_latency_ms.p95 == stated",
    passes="ranks with 10 and 15 ms, aggregated 15",
    fails="the same, aggregated 12.5",
)
def _check_latency(case: rule.RunCase) -> Iterator[Finding]:
    yield from _compare_figures(case, (kv_cache_runs.LATENCY,))


@rule.run_rule(
    id="kvcache.tiers",
    title="Not all ranks of an option were served by memory alone",
    **KV_CACHE,
    source="6.3.4.4",
    formula="cpu_tier_ranks, or ranks with storage_entries 0, < all ranks of the option; some are a warning",
    passes="storage_entries 4,000 on every rank",
    fails="storage_entries 0 on every rank",
)
def _check_tiers(case: rule.RunCase) -> Iterator[Finding]:
    for number, option in _options(case):
        stated = option.value("cpu_tier_ranks")
        in_memory = {rank.rank for rank in kv_cache_runs.ranks_in_memory(case.run.ranks, number)}
        num_in_memory = max(len(in_memory), len(stated) if isinstance(stated, list) else 0)
        ranks = option.integer("rank_count")
        yield pass_if(
            num_in_memory == 0,
            evidence=option.file,
            value=f"{num_in_memory} ranks",
            limit=f"fewer than {ranks} ranks",
            proof=f"option {number}: {num_in_memory} of {ranks} ranks stored nothing",
            fix="Repeat the run with less memory for the cache.",
            otherwise=Verdict.FAIL if num_in_memory >= ranks else Verdict.WARNING,
        )


@rule.run_rule(
    id="kvcache.headline",
    title="Each option states its bandwidths, tokens, latency and ranks",
    **KV_CACHE,
    source="6.3.4.5",
    formula="the figures of all options of the edition are numbers, and total_ranks is one",
    passes="options 1, 2 and 3 with all figures",
    fails="options 1 and 2 alone",
)
def _check_headline(case: rule.RunCase) -> Iterator[Finding]:
    options = dict(_options(case))
    missing = [f"option {number}" for number in case.kv_cache.options if int(number) not in options]
    missing += [
        f"option {number}: {name}"
        for number, option in options.items()
        for name in (*kv_cache_runs.SUMS, kv_cache_runs.LATENCY)
        if not option.has(name)
    ]
    missing += [] if case.run.summary.has("total_ranks") else ["total_ranks"]
    yield pass_if(
        not missing,
        evidence=case.run.summary.file,
        value=f"{len(missing)} missing",
        limit="0 missing",
        proof=f"missing: {', '.join(missing)}" if missing else "all figures are there",
        fix="Repeat the run, to its end.",
    )


@rule.run_rule(
    id="kvcache.traffic",
    title="Each option wrote to its storage and read from it",
    **KV_CACHE,
    source="6.6.2: an option that keeps all in memory measures no storage",
    formula="aggregated_read_bandwidth_gbps and aggregated_write_bandwidth_gbps > 0",
    passes="151.7 GiB/s read, 39.1 GiB/s written",
    fails="0 GiB/s read",
)
def _check_traffic(case: rule.RunCase) -> Iterator[Finding]:
    for number, option in _options(case):
        read, written = (option.number(name) for name in tuple(kv_cache_runs.SUMS)[:2])
        yield pass_if(
            read > 0 and written > 0,
            evidence=option.file,
            value=f"{read:g} and {written:g} GiB/s",
            limit="more than 0 GiB/s",
            proof=f"option {number} read {read:g} GiB/s and wrote {written:g} GiB/s",
            fix="Repeat the run with less memory for the cache.",
        )


@rule.run_rule(
    id="kvcache.gateway",
    title="A key-value cache in objects is reached through files",
    **KV_CACHE,
    source="6.5.1, 6.5.2",
    formula=(
        "cache_dir is a path; an object storage behind it is a warning, because its gateway and mount "
        "options are to be on record"
    ),
    passes="cache_dir /mnt/cache, product_API file",
    fails="cache_dir s3://bucket/cache",
)
def _check_gateway(case: rule.RunCase) -> Iterator[Finding]:
    cache, description = case.run.metadata.text("args", "cache_dir"), system_rules.require_description(case)
    api = description.text(*system_rules.SOLUTION, "architecture", "product_API")
    if "://" in cache:
        yield violation(
            evidence=case.run.metadata.file,
            value=cache,
            limit="a path",
            proof=f"cache_dir is {cache}, which is no path",
            fix="Repeat the run through a gateway that serves files.",
        )
        return
    yield pass_if(
        api != "object",
        evidence=description.file,
        value=api,
        proof=f"cache_dir is {cache}, the product serves {api}s",
        fix="Let the submitter name the gateway and its mount options.",
        otherwise=Verdict.WARNING,
    )


@rule.run_rule(
    id="kvcache.closed",
    title="In CLOSED only hosts, ranks and paths are the submitter's choice",
    **KV_CACHE,
    source="6.6.1",
    formula=(
        "every command has only flags of the edition's list; args.params and override_parameters are empty"
    ),
    passes="--model --num-users ... --rank-cache-base",
    fails="--performance-profile latency",
    not_applicable_if=rule.free_in_open,
)
def _check_closed(case: rule.RunCase) -> Iterator[Finding]:
    metadata = case.run.metadata
    flags = {name for command in read_commands(metadata) for name in command.options}
    strange = [f"--{name}" for name in sorted(flags - case.kv_cache.flags)]
    strange += [
        f"{'.'.join(path)} is {metadata.value(*path)!r:.60}"
        for path in (("args", "params"), ("override_parameters",))
        if metadata.has(*path) and metadata.value(*path)
    ]
    yield pass_if(
        not strange,
        evidence=metadata.file,
        value=len(strange),
        limit=0,
        proof=f"set beyond the table: {', '.join(strange)}"
        if strange
        else "only hosts, ranks and paths are set",
        fix="Hand it in as OPEN, or repeat the run without them.",
    )
