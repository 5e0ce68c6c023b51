"""Rules about runs: their number, files, hosts and parameters, and facts that several files record.

One program writes all files of a run, so they contradict each other only if one was edited. A file that lacks
a fact does not contradict any other file.
"""

import fnmatch
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, pairwise
from typing import Any, Final

from penstock.errors import name_some
from penstock.submission import tree_layout
from penstock.submission.parsed_file import KeyPath, MissingFact, ParsedFile
from penstock.submission.result_figures import OF_TRAINING, per_run, read_interval
from penstock.submission.result_figures import num_accelerators as num_accelerators_of
from penstock.submission.result_files import ResultDir
from penstock.submission.rules.rule import (
    BOTH,
    FIRST,
    LATER,
    METADATA,
    OVERRIDES,
    Case,
    Finding,
    Rule,
    Verdict,
    check,
    limit,
    not_applicable,
    nothing,
    num_accelerators,
    num_hosts,
    or_pass,
    pass_if,
    require_all_hosts,
    require_runs,
)
from penstock.workload.dlio_keys import canonical_path, canonical_values
from penstock.workload.shipped_catalog import families, shipped_card

_LATER_BOTH: Final[Any] = {"editions": LATER, "benchmarks": BOTH, "each": "result"}
_ONE_RUN: Final = "Submit the run's own files, or repeat the run."
_ABSENT: Final = object()
_MEMORY_TOLERANCE: Final = 0.01
_KIB_IN_GIB: Final = 1 << 20


def _judge_files(case: Case) -> Iterator[Finding]:
    """Pass if each of the edition's patterns matches a file of the run, or of the data generation."""
    run, edition = case.run, case.edition
    patterns = edition.checkpoints.files if case.is_checkpointing else edition.run_files
    if run in case.result.datagen:
        patterns = edition.timed.datagen_files
    if run.unlisted:
        raise MissingFact(run.unlisted, where=run.name)
    missing = [pattern for pattern in patterns if not fnmatch.filter(run.files, pattern)]
    yield pass_if(
        not missing,
        evidence=run.name,
        value=f"{len(patterns) - len(missing)} files",
        limit=f"{len(patterns)} files",
        proof=f"there is no {', no '.join(missing)}" if missing else "all files are there",
        fix="Copy the run's whole output folder.",
    )


def _judge_config_files(case: Case) -> Iterator[Finding]:
    expected, prefix = set(case.edition.timed.config_files), f"{tree_layout.CONFIG_FOLDER}/"
    for directory in (*case.result.datagen, *case.result.run_dirs()):
        present = {name.removeprefix(prefix) for name in directory.files if name.startswith(prefix)}
        problems = [f"there is no {name}" for name in sorted(expected - present)]
        problems += [f"{name} does not belong there" for name in sorted(present - expected)]
        yield pass_if(
            not problems,
            evidence=f"{directory.name}/{tree_layout.CONFIG_FOLDER}",
            value=f"{len(present)} files",
            limit=", ".join(sorted(expected)),
            proof="; ".join(problems) or "exactly its files are there",
            fix="Copy the run's whole output folder, and nothing into it.",
        )


def _judge_results_file(case: Case) -> Iterator[Finding]:
    report = case.result.report
    if not report.is_missing:
        report.value()
    yield pass_if(
        not report.is_missing,
        evidence=report.file,
        proof=f"{tree_layout.RESULTS_FILE} {'is not' if report.is_missing else 'is'} there",
        fix="Write it with `penstock submission report --write`.",
    )


def _judge_workload(case: Case) -> Iterator[Finding]:
    run, edition, checkpoints = case.run, case.edition, case.edition.checkpoints
    family, accelerator = run.workload()
    known: Collection[str] = edition.min_utilization_percent
    accelerators: Collection[str] = edition.accelerators
    if case.is_checkpointing:  # the rule on accelerators' memory judges the accelerator
        known, accelerators = checkpoints.models, checkpoints.accelerator_memory_gb
    is_known = family in known and (case.is_checkpointing or accelerator in accelerators)
    folder = case.result.location.model.lower()
    is_misplaced = is_known and folder not in ("", family)
    yield pass_if(
        is_known and not is_misplaced,
        evidence=run.metadata.file if case.is_checkpointing else run.overrides.file,
        value=f"{family} on {accelerator}",
        limit=f"{', '.join(known)} on {', '.join(accelerators)}",
        proof=(
            f"{family} lies in a folder called {folder}"
            if is_misplaced
            else f"{family} on {accelerator} is {'' if is_known else 'not '}of {edition.edition}"
        ),
        fix="Submit only results of this edition's workloads, each in its folder.",
    )


_SHARED_SETTINGS: Final[Mapping[str, Callable[[ResultDir], object]]] = {
    "workload": lambda run: "_".join(run.workload()),
    "files": lambda run: run.summary.integer("num_files_train"),
    "samples per file": lambda run: run.summary.integer("num_samples_per_file"),
}
"""Settings that all directories of all runs must share."""


def _shared_settings(case: Case) -> Iterator[dict[str, Any]]:
    """Yield each setting that runs must share, with its values; checkpointing has no number of files."""
    runs = require_runs(case.result)
    for name in (
        "workload",
        "accelerators",
        *(() if case.is_checkpointing else ("files", "samples per file")),
    ):
        values = {
            run.name: str(num_accelerators_of(run))
            if name == "accelerators"
            else ", ".join(sorted({str(_SHARED_SETTINGS[name](directory)) for directory in run.dirs}))
            for run in runs
        }
        listed = ", ".join(f"{run}: {value}" for run, value in values.items())
        yield {"setting": name, "values": sorted(set(values.values())), "listed": listed}


def _judge_pauses(case: Case) -> Iterator[Finding]:
    runs = case.result.runs
    if len(runs) < 2:
        found = "is one run" if runs else "are no runs"
        raise MissingFact(f"there {found}, and no pause", where=case.name)
    intervals = [read_interval(run.dirs[0]) for run in runs]
    shortest_s = min((end - begin).total_seconds() for begin, end in intervals)
    limit_s = case.edition.timed.max_pause_runs * shortest_s
    for ((_, end), (begin, _)), run in zip(pairwise(intervals), runs[1:], strict=True):
        pause_s = (begin - end).total_seconds()
        holds = 0 <= pause_s < limit_s
        yield pass_if(
            holds,
            evidence=run.dirs[0].name,
            value=f"{pause_s:g} s",
            limit=f"{limit_s:g} s",
            proof=(
                f"{pause_s:g} s after the run before, {'within' if holds else 'not within'} 0 and "
                f"{limit_s:g} s (the shortest run takes {shortest_s:g} s)"
            ),
            fix="Repeat the runs one after the other.",
        )


def _named_hosts(case: Case) -> dict[str, int]:
    hosts, names = num_hosts(case.run), case.run.metadata.value("args", "hosts")
    if isinstance(names, str):
        names = names.replace(",", " ").split()
    return {"hosts": hosts, "named": len(names) if isinstance(names, list) else 0}


def _judge_alike_hosts(case: Case) -> Iterator[Finding]:
    summary, metadata = case.run.summary, case.run.metadata
    require_all_hosts(case.run)
    count, max_ratio = num_hosts(case.run), case.edition.timed.max_ratio_of_hosts
    path, keys = ("system_info", "hosts"), (("memory", "total"), ("cpu", "num_logical_cores"))
    for name, key in zip(("host_memory_GB", "host_cpu_count"), keys, strict=True):
        # DLIO fills its lists wrongly on clusters; the metadata may have the same facts for each host.
        numbers, hosts = summary.numbers(name), metadata.parts(*path) if metadata.has(*path) else {}
        if (len(numbers) != count or min(numbers) <= 0) and hosts:
            numbers = tuple(host.number(*key) for host in hosts.values())
        is_comparable = len(numbers) == count and min(numbers) > 0
        ratio = max(numbers) / min(numbers) if is_comparable else 0.0
        yield pass_if(
            is_comparable and ratio <= max_ratio,
            value=f"{ratio:.4g}" if is_comparable else f"{len(numbers)} entries",
            limit=f"{max_ratio:g}",
            proof=(
                f"{name}: {max(numbers):g} / {min(numbers):g} = {ratio:.4g}"
                if is_comparable
                else f"{name} has {len(numbers)} entries for {count} hosts, which cannot be compared"
            ),
            fix="Let the reviewer compare the hosts.",
            otherwise=Verdict.WARNING,
        )


def _judge_host_memory(case: Case) -> Iterator[Finding]:
    summary, metadata = case.run.summary, case.run.metadata
    if not summary.has("host_meminfo", "MemTotal"):
        yield not_applicable(summary.file, "the summary has no host_meminfo")
    else:
        yield _compare_with_meminfo(summary)
    if metadata.has("system_info", "total_memory_bytes"):
        listed_gib = sum(summary.numbers("host_memory_GB"))
        total_gib = metadata.number("system_info", "total_memory_bytes") / (1 << 30)
        yield pass_if(
            abs(listed_gib - total_gib) <= _MEMORY_TOLERANCE * total_gib,
            evidence=metadata.file,
            value=f"{listed_gib:.6g} GiB",
            limit=f"{total_gib:.6g} GiB",
            proof=f"host_memory_GB sums up to {listed_gib:.6g} GiB, system_info has {total_gib:.6g} GiB",
            fix="Let the reviewer ask which hosts ran.",
            otherwise=Verdict.WARNING,
        )
    if summary.has("potential_caching") and summary.has("data_size_per_host_GB"):
        # No rule uses which hosts could hold their share of the data in memory, but readers do.
        memory_gib, share_gib = summary.numbers("host_memory_GB"), summary.number("data_size_per_host_GB")
        stated = [*summary.numbers("potential_caching")]
        # On clusters, the list of memory may have more entries than there are hosts.
        expected = [float(each_gib > share_gib) for each_gib in memory_gib[: len(stated)]]
        yield pass_if(
            stated == expected,
            value=_list(stated),
            limit=_list(expected),
            proof=(
                f"potential_caching is {_list(stated)}, by {share_gib:.6g} GiB of data a host and "
                f"{max(memory_gib):.6g} GiB of memory it is {_list(expected)}"
            ),
            fix="Let the reviewer ask whether the data were read from memory.",
            otherwise=Verdict.WARNING,
        )


def _compare_with_meminfo(summary: ParsedFile) -> Finding:
    listed = summary.numbers("host_memory_GB")
    text = summary.text("host_meminfo", "MemTotal")
    stated = ParsedFile(file=summary.file, content={"host_meminfo.MemTotal": text.removesuffix("kB").strip()})
    total_gib = stated.number("host_meminfo.MemTotal") / _KIB_IN_GIB
    if min(listed) <= 0 or total_gib <= 0:
        return not_applicable(summary.file, "host_memory_GB has empty entries")
    ratios = [entry / total_gib for entry in listed]
    holds = any(round(ratio) >= 1 and abs(ratio - round(ratio)) <= _MEMORY_TOLERANCE for ratio in ratios)
    return pass_if(
        holds,
        value=f"{max(listed):.6g} GiB",
        limit=f"{total_gib:.6g} GiB",
        proof=(
            f"host_meminfo.MemTotal is {total_gib:.6g} GiB, host_memory_GB has "
            f"{'it' if holds else f'{max(listed):.6g} GiB at most, and no multiple of it'}"
        ),
        fix=_ONE_RUN,
    )


def _judge_configuration(case: Case) -> Iterator[Finding]:
    run, parameters = case.run, case.parameters
    free = parameters.allowed(case.division)
    family, accelerator = run.workload()
    reference = _published_values(family, None if case.is_checkpointing else accelerator)
    if reference is None:
        name = family if case.is_checkpointing else f"{family} on {accelerator}"
        file = run.metadata if case.is_checkpointing else run.overrides
        raise MissingFact(f"{name} has no known parameters", where=file.file)
    given = canonical_values(run.config.value("workload"))
    # Keys are compared by our own paths, because configurations spell some keys in two ways.
    compared = {
        key: (given.get(path, _ABSENT), reference[path])
        for key in parameters.compared
        if key not in free and (path := canonical_path(tuple(key.split(".")))) in reference
    }
    missing = [f"workload.{key}" for key, (value, _) in compared.items() if value is _ABSENT]
    if missing:
        raise MissingFact(f"there is no field {', '.join(missing)}", where=run.config.file)
    # Numbers are compared by value (0.9 is 0.90), everything else as strings.
    changed = [
        f"{key} is {value!r}, not {wanted!r}"
        for key, (value, wanted) in compared.items()
        if not (type(value) in (int, float) and value == wanted) and str(value) != str(wanted)
    ]
    yield pass_if(
        not changed,
        evidence=run.config.file,
        value=f"{len(changed)} changed",
        limit="0 changed",
        proof="; ".join(changed) or f"{len(compared)} values agree with {family} on {accelerator}",
        fix="Repeat the runs with the workload as it is.",
    )


@cache
def _published_values(family: str, accelerator: str | None) -> Mapping[KeyPath, object] | None:
    """Return a workload's shipped values by our own paths; without an accelerator, a checkpoint model's."""
    if accelerator is None:
        card = shipped_card(family)
        return None if card is None else canonical_values(card.sections)
    shipped = families().get(family)
    if shipped is None or accelerator not in shipped["accelerators"]:
        return None
    # Values that an accelerator sets replace the shared ones.
    shared, changes = shipped["workload"], shipped["accelerators"][accelerator]
    return {**canonical_values(shared), **canonical_values(changes)}


def _recorded_configuration(case: Case) -> KeyPath:
    """Return the key under which the metadata have the whole configuration."""
    names = case.edition.timed.metadata_parameters if case.edition.rules in LATER else ()
    return next(((name,) for name in names if case.run.metadata.has(name)), ("parameters",))


def _judge_recorded_numbers(case: Case) -> Iterator[Finding]:
    run, parameters = case.run, _recorded_configuration(case)
    # Each number, with the places that may record it; the first one is compared with the others.
    recorded: dict[str, list[tuple[ParsedFile, KeyPath]]] = {
        name: [
            (run.summary, (key,)),
            (run.config, ("workload", "dataset", key)),
            (run.metadata, (*parameters, "dataset", key)),
            (run.metadata, ("override_parameters", f"dataset.{key}")),
        ]
        for name, key in (("files", "num_files_train"), ("samples per file", "num_samples_per_file"))
    }
    recorded["epochs"] = [
        (run.summary, ("epochs",)),
        (run.config, ("workload", "train", "epochs")),
        (run.metadata, (*parameters, "train", "epochs")),
    ]
    recorded["accelerators"] = [
        (run.summary, ("num_accelerators",)),
        (run.metadata, ("num_processes",)),
        (run.metadata, ("args", "num_accelerators")),
    ]
    problems = []
    for name, places in recorded.items():
        stated = [(file, file.number(*path)) for file, path in places if file.has(*path)]
        problems += [
            f"{name}: {value:,g} in {_short(file)}, {stated[0][1]:,g} in {_short(stated[0][0])}"
            for file, value in stated[1:]
            if value != stated[0][1]
        ]
    problems += _find_other_models(run)
    # The command line has the number that was requested; the configuration shows the one that was used.
    verdict, key = Verdict.FAIL if problems else Verdict.WARNING, "num_files_train"
    if (text := run.settings().get(f"dataset.{key}")) is not None:
        asked = ParsedFile(file=run.overrides.file, content={key: text}).number(key)
        if asked != (read := run.summary.number(key)):
            problems.append(f"files: {asked:,g} in {_short(run.overrides)}, {read:,g} in summary.json")
    yield pass_if(
        not problems,
        evidence=run.name,
        value=f"{len(problems)} differ",
        limit="0 differ",
        proof="; ".join(problems) or "all files of the run record the same numbers",
        fix=_ONE_RUN,
        otherwise=verdict,
    )


def _find_other_models(run: ResultDir) -> Iterator[str]:
    """Compare a run's files by the model and the accelerator that they name; yield each mismatch."""
    family, accelerator = run.workload()
    for path in (("workload", "model", "name"), ("workload", "model")):
        if run.config.has(*path) and isinstance(run.config.value(*path), str):
            model = run.config.text(*path).lower()
            if not (family.startswith(model) or model.startswith(family)):
                yield f"model: {model} in {_short(run.config)}, {family} in {_short(run.overrides)}"
    stated = run.accelerator()
    if stated and stated != accelerator:
        yield f"accelerator: {stated} in {_short(run.metadata)}, {accelerator} in {_short(run.overrides)}"


def _short(file: ParsedFile) -> str:
    return file.file.rpartition("/")[2]


def _find_other_parameters(case: Case) -> Iterator[str]:
    run, parameters = case.run, case.parameters
    # Keys that overrides.yaml also has are judged by the rule on that file.
    allowed = parameters.allowed(case.division) | run.settings().keys()
    for place, keys in recorded_overrides(run.metadata):
        if forbidden := sorted(set(keys) - allowed):
            yield f"{place} sets {', '.join(forbidden)}"
    recorded, configured = (
        canonical_values(file.value(*path)) if file.has(*path) else {}
        for file, path in ((run.metadata, _recorded_configuration(case)), (run.config, ("workload",)))
    )
    for key in (*parameters.compared, "dataset.num_files_train"):
        path = canonical_path(tuple(key.split(".")))
        here, there = recorded.get(path, _ABSENT), configured.get(path, _ABSENT)
        if _ABSENT not in (here, there) and _plain(here) != _plain(there):
            yield f"{key} is {here!r:.40} in {_short(run.metadata)}, {there!r:.40} in config.yaml"


def recorded_overrides(metadata: ParsedFile) -> Iterator[tuple[str, list[str]]]:
    """Yield the keys that a run set, for each place that records them."""
    words: Any = {}
    if metadata.has("override_parameters"):
        overrides = metadata.value("override_parameters")
        words["override_parameters"] = overrides if isinstance(overrides, dict) else ()
    if metadata.has("args", "params"):
        params = metadata.value("args", "params")
        entries = params if isinstance(params, list | dict) else [params]
        flat = chain.from_iterable(entry if isinstance(entry, list) else [entry] for entry in entries)
        words["args.params"] = [str(word).partition("=")[0] for word in flat]
    if metadata.has("executed_command"):
        command = str(metadata.value("executed_command"))
        try:
            parts = shlex.split(command)
        except ValueError:  # a quote is not closed
            parts = command.split()
        words["executed_command"] = [
            word.partition("=")[0] for word in parts if word.startswith("++workload.")
        ]
    for place, keys in words.items():
        # Tools also write an empty string if nothing was set.
        yield place, [str(key).lstrip("+~").removeprefix("workload.") for key in keys if key != ""]


def _plain(value: Any) -> Any:
    """Return the value as a number or in lower case, because metadata quote numbers and Booleans."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value).lower()


def _find_other_identity(case: Case) -> Iterator[str]:
    report, run = case.result.report, require_runs(case.result)[0]
    report.value("overall")
    first, per_dir = run.dirs[0], {run_dir.summary.integer("num_accelerators") for run_dir in run.dirs}
    family, accelerator = first.workload()
    entries = report.value("runs") if report.has("runs") else {}
    counts: tuple[tuple[str, set[int]], ...] = (
        ("train_num_accelerators", {num_accelerators_of(run)} | per_dir),
        ("num_files_train", {first.summary.integer("num_files_train")}),
        ("num_samples_per_file", {first.summary.integer("num_samples_per_file")}),
        ("num_benchmark_runs", {len(case.result.runs)}),
    )
    names = map(str, entries if isinstance(entries, dict) else ())
    for place in (("overall",), *(("runs", name) for name in names)):
        where = ".".join(place)
        for key, expected in (("model", family), ("accelerator", accelerator)):
            if report.has(*place, key) and report.text(*place, key).lower() != expected:
                yield f"{where}.{key} is {report.text(*place, key)}, the runs have {expected}"
        for key, allowed in counts:
            if report.has(*place, key) and report.integer(*place, key) not in allowed:
                shown = " or ".join(map(str, sorted(allowed)))
                yield f"{where}.{key} is {report.integer(*place, key):,}, the runs have {shown}"
    if not report.has("runs"):
        return
    if not isinstance(entries, dict):
        raise MissingFact("runs is not a mapping of runs", where=report.file)
    key = "train_throughput_samples_per_second"
    stated = sorted(report.number("runs", name, key) for name in entries if report.has("runs", name, key))
    rates = sorted(per_run(case.result, OF_TRAINING["throughput"]).values())
    tolerance = case.edition.mean_tolerance
    if stated and (
        len(stated) != len(rates)
        or any(abs(a - b) > tolerance * max(abs(a), abs(b)) for a, b in zip(stated, rates, strict=True))
    ):
        yield f"runs.*.{key} are {_list(stated)}, recomputed {_list(rates)}"


def _list(values: list[float]) -> str:
    return name_some([f"{value:.8g}" for value in values], 6)


def _judge_repeated_keys(case: Case) -> Iterable[Finding]:
    result = case.result
    files = [result.report, *result.systems, result.context.manifest]
    for run in result.all_dirs():
        files += (run.summary, run.config, run.overrides, run.metadata, run.provenance, run.separation)
        files += (run.record, run.epochs, *run.stats[1:])
    repeated = (
        Finding(
            verdict=Verdict.FAIL,
            evidence=file.file,
            value=f"{len(file.repeated)} keys",
            limit="0 keys",
            proof=f"{name_some(file.repeated)} given twice",
            fix="Submit the file as the benchmark wrote it.",
        )
        for file in files
        if file.repeated
    )
    return or_pass(repeated, evidence=result.name, proof="each key is given once")


RULES: Final = (
    limit(
        id="datagen.number",
        title="The data set was generated once",
        editions=LATER,
        each="result",
        source="2.1.13",
        formula="number of result directories in datagen/ == the edition's",
        passes="datagen/20260701_080000/",
        fails="two result directories in datagen/",
        fact=lambda case: len(case.result.datagen),
        limit=lambda case: case.edition.timed.num_datagen,
        proof="{fact} result directories {sign} {limit}",
        fix="Submit the result directory of the data set that the runs read.",
    ),
    Rule(
        id="datagen.files",
        title="The result directory of the data generation has its files",
        editions=LATER,
        each="datagen",
        source="2.1.14; the JSON files that its text names too are never written by a generation",
        formula="every pattern of the edition's list matches a file of the directory",
        passes="training_datagen.stdout.log, training_datagen.stderr.log, dlio.log",
        fails="no dlio.log",
        judge=_judge_files,
    ),
    limit(
        id="runs.number",
        title="A result has exactly the number of runs that the edition requires",
        each="result",
        source="v1.0 rules, a result is the mean of five runs; 2.1.17: one warm-up and five",
        formula="number of runs == num_runs; in v2.0 five runs without the warm-up are a warning",
        passes="run1 ... run5",
        fails="run1 ... run4",
        fact=lambda case: len(require_runs(case.result, "there is no folder of a run")),
        limit=lambda case: case.edition.num_runs,
        proof="{fact} runs {sign} {limit}",
        fix="Submit {limit} consecutive runs, all of them.",
        otherwise=lambda it: (
            Verdict.WARNING if it.case.edition.is_without_warm_ups(it.fact) else Verdict.FAIL
        ),
    ),
    Rule(
        id="runs.files",
        title="Each run has its files",
        benchmarks=BOTH,
        source="v1.0 rules, structure of a submission; 2.1.19 and 2.1.25 of later editions",
        formula="every pattern of the edition's list matches a file in the run's folder",
        passes="run1/ with summary.json, per_epoch_stats.json and configs/",
        fails="run3/ without summary.json",
        judge=_judge_files,
    ),
    Rule(
        id="runs.configuration",
        title="The configuration's folder has exactly its files",
        **_LATER_BOTH,
        source="2.1.15, 2.1.20, 2.1.26",
        formula="dlio_config/ has the files of the edition's list",
        passes="dlio_config/ with config.yaml, hydra.yaml, overrides.yaml",
        fails="dlio_config/ with config.yaml alone",
        judge=_judge_config_files,
    ),
    Rule(
        id="runs.results",
        title="The runs have their results.json",
        **_LATER_BOTH,
        source="2.1.16, 2.1.22",
        formula="results.json is next to the runs, and can be read",
        passes="run/results.json",
        fails="no results.json",
        judge=_judge_results_file,
    ),
    Rule(
        id="runs.workload",
        title="Workload and accelerator belong to the edition",
        benchmarks=BOTH,
        source="v1.0 rules, workloads; 2.1.11, 2.1.21 and 4.3.3 of later editions",
        formula=(
            "workload= in overrides.yaml (of checkpoints, the metadata) names a workload and an accelerator "
            "of the edition; the folder has the workload's name, in any case"
        ),
        passes="workload=unet3d_h100",
        fails="workload=bert_v100",
        judge=_judge_workload,
    ),
    check(
        id="runs.same",
        title="Workload, accelerators, files and samples per file are the same in all runs",
        benchmarks=BOTH,
        each="result",
        source="v1.0 rules, a result is the mean of runs of one configuration; 1.3 of later editions",
        formula="one value of each over all runs",
        passes="five runs with 8 accelerators",
        fails="four runs with 8 accelerators, one with 7",
        facts=_shared_settings,
        holds=lambda it: len(it.values) == 1,
        show=(lambda it: ", ".join(it.values), "one value"),
        proof=lambda it: (
            f"{it.setting}: {f'{it.values[0]} in all runs' if len(it.values) == 1 else it.listed}"
        ),
        fix="Repeat the runs that differ.",
    ),
    Rule(
        id="runs.pauses",
        title="Runs follow one another, with pauses shorter than a run",
        editions=LATER,
        each="result",
        source="2.1.18: the text measures from end to start, its tool from start to start; both agree here",
        formula="0 <= start of a run - end of the run before < max_pause_runs x duration of the shortest run",
        passes="runs of 18 minutes with 2 minutes between them",
        fails="runs of 18 minutes with 18 minutes between them",
        judge=_judge_pauses,
    ),
    check(
        id="hosts.accelerators",
        title="A single host simulates several accelerators",
        editions=LATER,
        source="3.3.3, a recommendation",
        formula="num_hosts > 1, or num_accelerators >= the edition's number (else warning)",
        passes="one host, 4 accelerators",
        fails="one host, 3 accelerators (a warning)",
        facts=lambda case: {
            "hosts": num_hosts(case.run),
            "ranks": num_accelerators(case),
            "least": case.edition.timed.min_accelerators_alone,
        },
        holds=lambda it: it.hosts > 1 or it.ranks >= it.least,
        show=("{ranks}", "{least}"),
        proof="{ranks} accelerators on {hosts} hosts; one host should have {least}",
        fix="Simulate more accelerators on this host.",
        otherwise=Verdict.WARNING,
    ),
    check(
        id="hosts.single",
        title="A run on one host was started on only one host",
        editions=LATER,
        source="3.3.4",
        formula="num_hosts > 1, or at most one host in the metadata's args.hosts",
        passes="num_hosts 1, hosts [node1]",
        fails="num_hosts 1, hosts [node1, node2]",
        facts=_named_hosts,
        holds=lambda it: it.hosts > 1 or it.named <= 1,
        at=METADATA,
        show=("{named} named", "{hosts} in the summary"),
        proof="{named} hosts were named, the summary has {hosts}",
        fix="Repeat the run on the hosts that you submit.",
    ),
    limit(
        id="hosts.equal",
        title="Every host has the same number of accelerators",
        editions=LATER,
        source="3.3.6",
        formula="num_accelerators is a multiple of num_hosts",
        passes="8 accelerators on 2 hosts",
        fails="9 accelerators on 2 hosts",
        fact=lambda case: num_accelerators(case) % num_hosts(case.run),
        limit=0,
        proof=lambda it: (
            f"{num_accelerators(it.case)} accelerators / {num_hosts(it.case.run)} hosts leaves {it.fact}"
        ),
        fix="Give every host the same number of accelerators.",
    ),
    Rule(
        id="hosts.alike",
        title="Hosts have similar memory and cores",
        editions=LATER,
        source="3.3.7, a recommendation",
        formula=(
            "largest / smallest of host_memory_GB and of host_cpu_count <= the edition's ratio (else "
            "warning); lists without one entry per host are replaced by the metadata's hosts"
        ),
        passes="hosts of 256 and 256 GiB",
        fails="hosts of 256 and 512 GiB (a warning)",
        judge=_judge_alike_hosts,
    ),
    Rule(
        id="hosts.memory",
        title="The hosts' memory is what the hosts themselves report",
        benchmarks=BOTH,
        source="ours: the same program reads both from the same hosts",
        formula=(
            "an entry of host_memory_GB is the MemTotal of host_meminfo, or a multiple, +- 1 %; or else a "
            "warning: the sum is system_info.total_memory_bytes, +- 1 %; potential_caching is 1 for exactly "
            "the hosts with more memory than data_size_per_host_GB"
        ),
        passes='host_memory_GB [247.7], MemTotal "259739116 kB"',
        fails='host_memory_GB [64], MemTotal "259739116 kB"',
        judge=_judge_host_memory,
    ),
    check(
        id="parameters.allowed",
        title="A run sets only what its division leaves free",
        benchmarks=BOTH,
        source="v1.0 rules, CLOSED and OPEN; 3.6.2, 3.6.3 and 4.6.3 of later editions",
        formula="keys in overrides.yaml are in the division's list or set by the benchmark's own script",
        passes="closed, ++workload.reader.read_threads=16",
        fails="closed, ++workload.reader.batch_size=1",
        facts=lambda case: {
            "division": case.division.value,
            "changed": len(case.run.settings().keys() - {"workload"}),
            "forbidden": ", ".join(
                sorted(case.run.settings().keys() - {"workload"} - case.parameters.allowed(case.division))
            ),
        },
        holds=lambda it: not it.forbidden,
        at=OVERRIDES,
        show=("{forbidden}", "the free keys of {division}"),
        proof=lambda it: (
            f"{it.forbidden}: not free in {it.division}"
            if it.forbidden
            else f"all {it.changed} keys are free in {it.division}"
        ),
        fix="Repeat the runs without these.",
    ),
    check(
        id="parameters.odirect",
        title="Only workloads whose reader can bypass the page cache set reader.odirect",
        editions=LATER,
        source="checks of a run, odirect",
        formula="reader.odirect is set only for workloads of the edition's list",
        passes="unet3d, ++workload.reader.odirect=True",
        fails="retinanet, ++workload.reader.odirect=True",
        facts=lambda case: {
            "family": case.run.workload()[0],
            "allowed": ", ".join(sorted(case.edition.timed.odirect_workloads)),
            "state": case.run.settings().get("reader.odirect", "false").lower(),
        },
        holds=lambda it: it.state != "true" or it.family in it.case.edition.timed.odirect_workloads,
        at=OVERRIDES,
        show=("{family}, odirect {state}", "{allowed}"),
        proof="reader.odirect is {state} for {family}",
        fix="Repeat the runs without reader.odirect.",
    ),
    Rule(
        id="parameters.configuration",
        title="A run's configuration is the workload's, except for what its division leaves free",
        benchmarks=BOTH,
        source="v1.0 rules, CLOSED and OPEN; the workload's published parameters",
        formula="compared keys of config.yaml == the workload's, unless the division leaves them free",
        passes="closed, unet3d, config.yaml with batch_size 7",
        fails="closed, unet3d, config.yaml with batch_size 1, whatever overrides.yaml says",
        judge=_judge_configuration,
    ),
    nothing(
        id="parameters.recorded",
        title="All records of a run's parameters agree with its configuration, and they are allowed",
        editions=LATER,
        benchmarks=BOTH,
        source="3.6.2, 4.3.2, 4.6.3, which tools read in different places",
        formula=(
            "keys in override_parameters, args.params and executed_command are free in the division or in "
            "overrides.yaml; compared keys have one value in the metadata and in config.yaml"
        ),
        passes="metadata with reader.batch_size 7, config.yaml with 7",
        fails="args.params with reader.batch_size=1, and nothing in overrides.yaml",
        problems=_find_other_parameters,
        at=METADATA,
        join=lambda problems: name_some(problems, 5, separator="; "),
        show=("{number} differ", "0 differ"),
        proof="the metadata record what the configuration has",
        fix="Repeat the runs without these parameters, and submit their files as they were written.",
    ),
    Rule(
        id="runs.recorded",
        title="Configuration, command line and metadata have the numbers of the summary",
        source="ours: one program writes all of them",
        formula=(
            "files, samples per file, epochs, accelerators and model are the same everywhere; a different "
            "number of files in overrides.yaml alone is a warning"
        ),
        passes="28,000 files in summary.json, config.yaml, overrides.yaml and the metadata",
        fails="17,500 files in summary.json, 2,000 in config.yaml",
        judge=_judge_recorded_numbers,
    ),
    nothing(
        id="report.identity",
        title="The report belongs to these runs",
        editions=FIRST,
        each="result",
        source="v1.0 rules, a result is what its report says of its runs",
        formula=(
            "model, accelerator, accelerators, files, samples per file and number of runs are those of the "
            "runs; so are the rates, in any order"
        ),
        passes='"train_num_accelerators": "10", runs on 10 accelerators',
        fails="a report of 12 accelerators, runs on one",
        problems=_find_other_identity,
        at=lambda case: case.result.report.file,
        show=("{number} differ", "0 differ"),
        proof=lambda it: f"it says what its {len(it.case.result.runs)} runs do",
        fix="Write the report from these runs (penstock submission report --write).",
    ),
    Rule(
        id="files.keys",
        title="No file contains a key twice",
        benchmarks=BOTH,
        each="result",
        source="ours: of two values programs read the last, and people the first",
        formula="each key once in a mapping",
        passes='{"train_au_meet_expectation": "success"}',
        fails='{"train_au_meet_expectation": "fail", "train_au_meet_expectation": "success"}',
        judge=_judge_repeated_keys,
    ),
)
