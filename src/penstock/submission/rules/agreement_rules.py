"""Cross-checks of what is recorded several times: by summary, configuration, command line, metadata, report.

One program writes all of these files of a run, so they differ only where one was edited. Invariant: a record
that a file does not have is no contradiction.
"""

import shlex
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

from penstock.errors import name_some
from penstock.submission.finding import Finding, Verdict, not_applicable, pass_if
from penstock.submission.parsed_file import KeyPath, MissingFact, ParsedFile
from penstock.submission.recomputed_metrics import num_accelerators, per_run, samples_per_second
from penstock.submission.result_files import ResultDir
from penstock.submission.rules import rule
from penstock.workload.dlio_keys import canonical_path, canonical_values

_DATASET: Final = ("workload", "dataset")
_FIX: Final = "Hand in the files of one run, as the benchmark wrote them."
_ABSENT: Final = object()
_MEMORY_TOLERANCE: Final = 0.01
_KIB_IN_GIB: Final = 1 << 20


def _parameters(case: rule.RunCase) -> KeyPath:
    """By which name the metadata have the whole configuration."""
    names = case.edition.timed.metadata_parameters if case.edition.timed else ()
    return next(((name,) for name in names if case.run.metadata.has(name)), ("parameters",))


def _recorded_counts(case: rule.RunCase) -> Iterator[tuple[str, list[tuple[ParsedFile, KeyPath]]]]:
    """Each number, and the places that may record it; the first is the one that others are held against."""
    run, parameters = case.run, _parameters(case)
    for name, key in (
        ("files", "num_files_train"),
        ("samples a file", "num_samples_per_file"),
    ):
        yield (
            name,
            [
                (run.summary, (key,)),
                (run.config, (*_DATASET, key)),
                (run.metadata, (*parameters, "dataset", key)),
                (run.metadata, ("override_parameters", f"dataset.{key}")),
            ],
        )
    yield (
        "epochs",
        [
            (run.summary, ("epochs",)),
            (run.config, ("workload", "train", "epochs")),
            (run.metadata, (*parameters, "train", "epochs")),
        ],
    )
    yield (
        "accelerators",
        [
            (run.summary, ("num_accelerators",)),
            (run.metadata, ("num_processes",)),
            (run.metadata, ("args", "num_accelerators")),
        ],
    )


@rule.run_rule(
    id="runs.recorded",
    title="Configuration, command line and metadata have the numbers of the summary",
    editions=rule.ALL,
    source="ours: one program writes all of them",
    formula=(
        "files, samples a file, epochs, accelerators and model are the same wherever they are recorded; "
        "another number of files in overrides.yaml alone is a warning"
    ),
    passes="28,000 files in summary.json, config.yaml, overrides.yaml and the metadata",
    fails="17,500 files in summary.json, 2,000 in config.yaml",
)
def _check_recorded_numbers(case: rule.RunCase) -> Iterator[Finding]:
    problems = []
    for name, places in _recorded_counts(case):
        stated = [(file, file.number(*path)) for file, path in places if file.has(*path)]
        problems += [
            f"{name}: {value:,g} in {_short(file)}, {stated[0][1]:,g} in {_short(stated[0][0])}"
            for file, value in stated[1:]
            if value != stated[0][1]
        ]
    problems += _find_other_models(case.run)
    overridden = _find_overridden_files(case.run)
    yield pass_if(
        not (problems or overridden),
        evidence=case.run.name,
        value=f"{len(problems) + len(overridden)} differ",
        limit="0 differ",
        proof="; ".join((*problems, *overridden)) or "all files of the run record the same numbers",
        fix=_FIX,
        otherwise=Verdict.FAIL if problems else Verdict.WARNING,
    )


def _find_overridden_files(run: ResultDir) -> list[str]:
    """What was asked for on the command line: the configuration shows what came of it."""
    key = "num_files_train"
    text = run.settings().get(f"dataset.{key}")
    if text is None:
        return []
    asked = ParsedFile(file=run.overrides.file, content={key: text}).number(key)
    read = run.summary.number(key)
    return (
        [] if asked == read else [f"files: {asked:,g} in {_short(run.overrides)}, {read:,g} in summary.json"]
    )


def _find_other_models(run: ResultDir) -> Iterator[str]:
    """The model of the configuration, which is the workload's family."""
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


@rule.run_rule(
    id="parameters.recorded",
    title="Whatever records the parameters of a run, they are allowed, and those of its configuration",
    editions=rule.LATER,
    benchmarks=rule.BOTH,
    source="3.6.2, 4.3.2, 4.6.3, which tools read in different places",
    formula=(
        "keys in override_parameters, args.params and executed_command are free in the division, or those of "
        "overrides.yaml; compared keys have one value in the metadata's configuration and in config.yaml"
    ),
    passes="metadata with reader.batch_size 7, config.yaml with 7",
    fails="args.params with reader.batch_size=1, and nothing in overrides.yaml",
)
def _check_recorded_parameters(case: rule.RunCase) -> Iterator[Finding]:
    run, parameters = case.run, case.parameters
    # What overrides.yaml has, too, is judged by the rule on that file.
    allowed = parameters.allowed(case.division) | run.settings().keys()
    problems = [
        f"{place} sets {', '.join(sorted(set(keys) - allowed))}"
        for place, keys in _recorded_overrides(run.metadata)
        if set(keys) - allowed
    ]
    recorded = _values(run.metadata, _parameters(case))
    configured = _values(run.config, ("workload",))
    for key in (*parameters.compared, "dataset.num_files_train"):
        path = canonical_path(tuple(key.split(".")))
        here, there = recorded.get(path, _ABSENT), configured.get(path, _ABSENT)
        if _ABSENT not in (here, there) and _plain(here) != _plain(there):
            problems.append(f"{key} is {here!r:.40} in {_short(run.metadata)}, {there!r:.40} in config.yaml")
    yield pass_if(
        not problems,
        evidence=run.metadata.file,
        value=f"{len(problems)} differ",
        limit="0 differ",
        proof=name_some(problems, 5, separator="; ") or "the metadata record what the configuration has",
        fix="Repeat the runs without these parameters, and hand in their files as they were written.",
    )


def _recorded_overrides(metadata: ParsedFile) -> Iterator[tuple[str, list[str]]]:
    """The keys that a run set, by each place that says so."""
    if metadata.has("override_parameters"):
        overrides = metadata.value("override_parameters")
        yield "override_parameters", [_key(key) for key in (overrides if isinstance(overrides, dict) else ())]
    if metadata.has("args", "params"):
        params = metadata.value("args", "params")
        words = params if isinstance(params, list) else list(params) if isinstance(params, dict) else [params]
        flat = chain.from_iterable(word if isinstance(word, list) else [word] for word in words)
        yield "args.params", [_key(str(word).partition("=")[0]) for word in flat]
    if metadata.has("executed_command"):
        words = _words(str(metadata.value("executed_command")))
        yield (
            "executed_command",
            [_key(word.partition("=")[0]) for word in words if word.startswith("++workload.")],
        )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote without end
        return command.split()


def _key(text: Any) -> str:
    return str(text).lstrip("+~").removeprefix("workload.")


def _values(file: ParsedFile, path: KeyPath) -> dict[KeyPath, Any]:
    """The values of a configuration by our own paths; none where it is not recorded."""
    return canonical_values(file.value(*path)) if file.has(*path) else {}


def _plain(value: Any) -> Any:
    """A value as it is meant: metadata quote numbers and truth values."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value).lower()


@rule.run_rule(
    id="hosts.memory",
    title="The hosts' memory is what they themselves report",
    editions=rule.ALL,
    benchmarks=rule.BOTH,
    source="ours: the same program reads both from the same hosts",
    formula=(
        "an entry of host_memory_GB is the MemTotal of the summary's host_meminfo, or a multiple, +- 1 %; "
        "their sum is system_info.total_memory_bytes, +- 1 % (else warning); potential_caching is 1 for the "
        "hosts whose host_memory_GB is above data_size_per_host_GB, and 0 for the others (else warning)"
    ),
    passes='host_memory_GB [247.7], MemTotal "259739116 kB"',
    fails='host_memory_GB [64], MemTotal "259739116 kB"',
)
def _check_host_memory(case: rule.RunCase) -> Iterator[Finding]:
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
        yield _compare_with_caching(summary)


def _compare_with_caching(summary: ParsedFile) -> Finding:
    """Which hosts could hold their share of the data in memory: no rule counts it, and readers do."""
    memory_gib, share_gib = summary.numbers("host_memory_GB"), summary.number("data_size_per_host_GB")
    stated = summary.numbers("potential_caching")
    # On clusters the list of the memory may have more entries than there are hosts.
    expected = [float(each_gib > share_gib) for each_gib in memory_gib[: len(stated)]]
    stated_text, expected_text = _list([*stated]), _list(expected)
    return pass_if(
        [*stated] == expected,
        evidence=summary.file,
        value=stated_text,
        limit=expected_text,
        proof=(
            f"potential_caching is {stated_text}, by {share_gib:.6g} GiB of data a host and "
            f"{max(memory_gib):.6g} GiB of memory it is {expected_text}"
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
        evidence=summary.file,
        value=f"{max(listed):.6g} GiB",
        limit=f"{total_gib:.6g} GiB",
        proof=(
            f"host_meminfo.MemTotal is {total_gib:.6g} GiB, host_memory_GB has "
            f"{'it' if holds else f'{max(listed):.6g} GiB at most, and no multiple of it'}"
        ),
        fix=_FIX,
    )


@rule.result_rule(
    id="report.identity",
    title="The report is of these runs",
    editions=rule.FIRST,
    source="v1.0 rules, a result is what its report says of its runs",
    formula=(
        "model, accelerator, accelerators, files, samples a file and runs of the report are those of the "
        "runs; so are the samples/s of each, in any order"
    ),
    passes='"train_num_accelerators": "10", runs on 10 accelerators',
    fails="a report of 12 accelerators beside runs on one",
)
def _check_report_identity(case: rule.ResultCase) -> Iterator[Finding]:
    report, result = case.result.report, case.result
    rule.require_runs(result)
    report.value("overall")
    problems = list(_find_other_identity(case))
    if report.has("runs"):
        problems += _find_other_rates(case)
    yield pass_if(
        not problems,
        evidence=report.file,
        value=f"{len(problems)} differ",
        limit="0 differ",
        proof="; ".join(problems) or f"it says what its {len(result.runs)} runs do",
        fix="Write the report from these runs (penstock submission report --write).",
    )


def _find_other_identity(case: rule.ResultCase) -> Iterator[str]:
    report, run = case.result.report, case.result.runs[0]
    first, per_dir = run.dirs[0], {run_dir.summary.integer("num_accelerators") for run_dir in run.dirs}
    family, accelerator = first.workload()
    entries = report.value("runs") if report.has("runs") else {}
    names = entries if isinstance(entries, dict) else {}
    for place in (("overall",), *(("runs", str(name)) for name in names)):
        where = ".".join(place)
        for key, expected in (("model", family), ("accelerator", accelerator)):
            if report.has(*place, key) and report.text(*place, key).lower() != expected:
                yield f"{where}.{key} is {report.text(*place, key)}, the runs have {expected}"
        counts: tuple[tuple[str, set[int]], ...] = (
            ("train_num_accelerators", {num_accelerators(run)} | per_dir),
            ("num_files_train", {first.summary.integer("num_files_train")}),
            ("num_samples_per_file", {first.summary.integer("num_samples_per_file")}),
            ("num_benchmark_runs", {len(case.result.runs)}),
        )
        for key, allowed in counts:
            if report.has(*place, key) and report.integer(*place, key) not in allowed:
                shown = " or ".join(map(str, sorted(allowed)))
                yield f"{where}.{key} is {report.integer(*place, key):,}, the runs have {shown}"


def _find_other_rates(case: rule.ResultCase) -> Iterator[str]:
    report = case.result.report
    entries, key = report.value("runs"), "train_throughput_samples_per_second"
    if not isinstance(entries, dict):
        raise MissingFact("runs is not a mapping of runs", where=report.file)
    stated = sorted(report.number("runs", name, key) for name in entries if report.has("runs", name, key))
    rates = sorted(per_run(case.result, samples_per_second))
    tolerance = case.edition.means.relative_tolerance
    if stated and (
        len(stated) != len(rates)
        or any(abs(a - b) > tolerance * max(abs(a), abs(b)) for a, b in zip(stated, rates, strict=True))
    ):
        yield f"runs.*.{key} are {_list(stated)}, recomputed {_list(rates)}"


def _list(values: list[float]) -> str:
    return name_some([f"{value:.8g}" for value in values], 6)


@rule.result_rule(
    id="files.keys",
    title="No file gives a key twice",
    editions=rule.ALL,
    benchmarks=rule.BOTH,
    source="ours: of two values programs read the last, and people the first",
    formula="each key once in a mapping",
    passes='{"train_au_meet_expectation": "success"}',
    fails='{"train_au_meet_expectation": "fail", "train_au_meet_expectation": "success"}',
)
def _check_repeated_keys(case: rule.ResultCase) -> Iterator[Finding]:
    result = case.result
    shared = (result.report, *result.systems, result.context.manifest)
    repeated = [
        file for file in (*shared, *chain.from_iterable(map(_files, result.all_dirs()))) if file.repeated
    ]
    for file in repeated:
        yield Finding(
            verdict=Verdict.FAIL,
            evidence=file.file,
            value=f"{len(file.repeated)} keys",
            limit="0 keys",
            proof=f"{name_some(file.repeated)} given twice",
            fix="Hand in the file as the benchmark wrote it.",
        )
    if not repeated:
        yield Finding(verdict=Verdict.PASS, evidence=result.name, proof="each key is given once")


def _files(run: ResultDir) -> tuple[ParsedFile, ...]:
    return (
        run.summary,
        run.config,
        run.overrides,
        run.metadata,
        run.provenance,
        run.separation,
        run.record,
        run.epochs,
        *run.stats[1:],
    )
