"""Rules about vector search: what was loaded, what was searched, and what its figures come to."""

import math
from collections.abc import Iterator
from typing import Final

from penstock.submission import vector_search_runs
from penstock.submission.finding import Finding, Verdict, not_applicable, pass_if, violation
from penstock.submission.parsed_file import MissingFact
from penstock.submission.result_files import ResultDir
from penstock.submission.rules import rule
from penstock.submission.tree_layout import Benchmark

VECTORS: Final[rule.Scope] = {"editions": rule.NEWEST, "benchmarks": (Benchmark.VECTOR_SEARCH,)}
LATENCIES = ("mean_latency_ms", "p95_latency_ms", "p99_latency_ms", "p999_latency_ms")
_CLOCK_TOLERANCE = 1e-7
"""A time since 1970 in a double is exact to a quarter of a microsecond."""


def _loading(case: rule.RunCase) -> ResultDir:
    if not case.result.datagen:
        raise MissingFact("there is no result directory in datagen/", where=case.result.name)
    return case.result.datagen[-1]


def _engine(case: rule.RunCase) -> str:
    return case.run.metadata.text("args", "vdb_engine").lower()


def _index(case: rule.RunCase) -> str:
    return case.run.summary.text("index_type").upper()


rule.limit_rule(
    rule.ResultCase,
    id="vectors.runs",
    title="An index has exactly as many runs as the edition asks for",
    **VECTORS,
    source="5.3.1",
    formula="number of runs == the edition's",
    passes="five result directories in run/",
    fails="four result directories in run/",
    value=lambda case: len(case.result.runs),
    compare="==",
    limit=lambda case: case.vectors.num_runs,
    evidence=lambda case: case.name,
    proof="{value} runs {sign} {limit}",
    fix="Hand in all runs of the index.",
)


@rule.run_rule(
    id="vectors.files",
    title="A run of vector search has its metadata and its figures",
    **VECTORS,
    source="LEAF-01; without summary.json tables are made of the figures over all ranks",
    formula="one *_metadata.json; summary.json (else a warning) or the figures over all ranks (else fail)",
    passes="summary.json, vector_database_20260701_100000_metadata.json",
    fails="neither summary.json nor vdb_multi_node_summary.json",
)
def _check_files(case: rule.RunCase) -> Iterator[Finding]:
    run = case.run
    if run.unlisted:
        raise MissingFact(run.unlisted, where=run.name)
    problems = [] if run.metadata.file != run.name else [run.metadata.problem]
    problems += ["there is no summary.json"] if run.summary.is_missing else []
    is_readable = run.metadata.file != run.name and not run.aggregate.is_missing
    yield pass_if(
        not problems,
        evidence=run.name,
        value=len(problems),
        limit=0,
        proof="; ".join(problems) or "both are there",
        fix="Hand in the run's whole output folder.",
        otherwise=Verdict.WARNING if is_readable else Verdict.FAIL,
    )


@rule.run_rule(
    id="vectors.scale",
    title="A run states how many vectors of which dimension it searched",
    **VECTORS,
    source="5.1.1, whose table of scales does not exist: only that both are there",
    formula="num_vectors and dimension of the summary are positive",
    passes="1,000,000 vectors of 1,536 dimensions",
    fails="num_vectors 0",
)
def _check_scale(case: rule.RunCase) -> Iterator[Finding]:
    vectors, dimension = (case.run.summary.integer(name) for name in ("num_vectors", "dimension"))
    yield pass_if(
        vectors > 0 and dimension > 0,
        evidence=case.run.summary.file,
        value=f"{vectors:,} x {dimension:,}",
        limit="more than 0",
        proof=f"{vectors:,} vectors of {dimension:,} dimensions",
        fix="Repeat the run on vectors.",
    )


@rule.run_rule(
    id="vectors.dimension",
    title="The vectors that are searched have the dimension of those that were loaded",
    **VECTORS,
    source="5.1.2",
    formula="dimension of the loading == dimension of the run == args.vector_dim",
    passes="1,536 loaded, 1,536 searched",
    fails="1,536 loaded, 768 searched",
)
def _check_dimension(case: rule.RunCase) -> Iterator[Finding]:
    loaded, searched = _loading(case).summary.integer("dimension"), case.run.summary.integer("dimension")
    asked = case.run.metadata.integer("args", "vector_dim")
    yield pass_if(
        loaded == searched == asked,
        evidence=case.run.summary.file,
        value=searched,
        limit=loaded,
        proof=f"{loaded} dimensions loaded, {searched} searched, {asked} asked for",
        fix="Search the vectors that were loaded.",
    )


@rule.run_rule(
    id="vectors.inserted",
    title="All vectors were inserted",
    **VECTORS,
    source="5.2.1, as its text says: equal",
    formula="inserted_vectors == num_vectors, in the loading and in the run",
    passes="1,000,000 of 1,000,000",
    fails="999,000 of 1,000,000",
)
def _check_inserted(case: rule.RunCase) -> Iterator[Finding]:
    for directory in (_loading(case), case.run):
        inserted, asked = (directory.summary.integer(name) for name in ("inserted_vectors", "num_vectors"))
        yield pass_if(
            inserted == asked,
            evidence=directory.summary.file,
            value=f"{inserted:,}",
            limit=f"{asked:,}",
            proof=f"{inserted:,} vectors were inserted, of {asked:,}",
            fix="Load all vectors, and repeat the runs.",
        )


@rule.run_rule(
    id="vectors.index",
    title="The index that is searched is the one that was built, and the folder's",
    **VECTORS,
    source="5.2.2",
    formula="index_type of the loading == index_type of the run == the folder's name, in any case",
    passes="DISKANN built, DISKANN searched, milvus/DISKANN/",
    fails="DISKANN built, HNSW searched",
)
def _check_index(case: rule.RunCase) -> Iterator[Finding]:
    built, searched = _loading(case).summary.text("index_type").upper(), _index(case)
    folder = case.result.location.model.upper()
    yield pass_if(
        built == searched == folder,
        evidence=case.run.summary.file,
        value=searched,
        limit=built,
        proof=f"{built} was built, {searched} searched, the folder is called {folder}",
        fix="Search the index that was built, and name the folder by it.",
    )


@rule.run_rule(
    id="vectors.recall",
    title="A run found some of the nearest vectors",
    **VECTORS,
    source="5.3.2, whose table of minimum recalls does not exist",
    formula="0 < recall <= 1, and == the mean over all queries",
    passes="recall 0.95",
    fails="recall 0.0",
)
def _check_recall(case: rule.RunCase) -> Iterator[Finding]:
    recall = case.run.summary.number("recall")
    mean = case.run.aggregate.number("recall", "mean_recall")
    yield pass_if(
        0 < recall <= 1 and math.isclose(recall, mean, rel_tol=case.edition.means.relative_tolerance),
        evidence=case.run.summary.file,
        value=f"{recall:g}",
        limit="more than 0",
        proof=f"recall is {recall:g}, the mean over all queries {mean:g}",
        fix="Build the ground truth from the vectors that were loaded, and repeat the runs.",
    )


@rule.run_rule(
    id="vectors.queries",
    title="A run states how many queries it made",
    **VECTORS,
    source="5.3.3, whose table of minimum numbers does not exist",
    formula="query_count > 0, and == throughput_qps x total_time_seconds to 1e-6",
    passes="3,607,200 queries in 62.6 s, 57,620 a second",
    fails="1,000 queries in 62.6 s, 57,620 a second",
)
def _check_queries(case: rule.RunCase) -> Iterator[Finding]:
    queries, rate, seconds = (
        case.run.summary.number(name) for name in ("query_count", "throughput_qps", "total_time_seconds")
    )
    yield pass_if(
        queries > 0 and math.isclose(queries, rate * seconds, rel_tol=1e-6),
        evidence=case.run.summary.file,
        value=f"{queries:,.0f}",
        limit=f"{rate * seconds:,.0f}",
        proof=f"{queries:,.0f} queries; {rate:g} a second x {seconds:g} s = {rate * seconds:,.0f}",
        fix="Restore the summary as the benchmark wrote it.",
    )


@rule.run_rule(
    id="vectors.figures",
    title="A run states its rate and its latencies",
    **VECTORS,
    source="5.3.4",
    formula="throughput_qps and four latencies are positive; p95 <= p99 <= p999",
    passes="6.3 ms on average, 19.6, 107.4 and 160.1 ms",
    fails="p99 107 ms, p999 16 ms",
)
def _check_figures(case: rule.RunCase) -> Iterator[Finding]:
    rate, latencies = (
        case.run.summary.number("throughput_qps"),
        [case.run.summary.number(n) for n in LATENCIES],
    )
    yield pass_if(
        rate > 0 and min(latencies) > 0 and latencies[1:] == sorted(latencies[1:]),
        evidence=case.run.summary.file,
        value=", ".join(f"{each:g}" for each in latencies),
        limit="in order",
        proof=f"{rate:g} queries a second; mean, p95, p99, p999: {', '.join(f'{x:g}' for x in latencies)} ms",
        fix="Restore the summary as the benchmark wrote it.",
    )


@rule.run_rule(
    id="vectors.truth",
    title="The ground truth covers all vectors",
    **VECTORS,
    source="5.3.5; older tools wrote no result_verdict.json, which is a warning",
    formula="result_verdict.json: flat_setup.ok is true and its coverage is 1",
    passes="coverage 1.0",
    fails="coverage 0.01",
)
def _check_truth(case: rule.RunCase) -> Iterator[Finding]:
    truth = case.run.ground_truth
    if truth.is_missing:
        yield violation(
            evidence=truth.file,
            proof="there is no result_verdict.json: nothing says what recall was measured against",
            fix="Let the reviewer ask how the ground truth was built.",
            verdict=Verdict.WARNING,
        )
        return
    is_ok, coverage = truth.boolean("flat_setup", "ok"), truth.number("flat_setup", "coverage")
    yield pass_if(
        is_ok and coverage == 1,
        evidence=truth.file,
        value=f"{coverage:g}",
        limit="1",
        proof=f"flat_setup.ok is {str(is_ok).lower()}, its coverage {coverage:g}",
        fix="Build the ground truth from all vectors, and repeat the runs.",
    )


@rule.run_rule(
    id="vectors.backend",
    title="All runs of an index used one storage",
    **VECTORS,
    source="5.5.1",
    formula="data_access_protocol and storage_type of the run == those of the first run",
    passes="file and local_fs in all runs",
    fails="object in one run, file in the others",
)
def _check_backend(case: rule.RunCase) -> Iterator[Finding]:
    def backend(run: ResultDir) -> tuple[str, ...]:
        keys = ("data_access_protocol", "storage_type")
        return tuple(str(run.metadata.value("args", k)) for k in keys if run.metadata.has("args", k))

    here, first = backend(case.run), backend(case.result.run_dirs()[0])
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


rule.limit_rule(
    rule.RunCase,
    id="vectors.engine",
    title="In CLOSED the engine is one of the edition's",
    **VECTORS,
    source="5.6.2",
    formula="args.vdb_engine is in the edition's list",
    passes="milvus",
    fails="pgvector",
    not_applicable_if=rule.free_in_open,
    value=lambda case: _engine(case) if _engine(case) not in case.vectors.engines else "known",
    compare="==",
    limit="known",
    evidence=lambda case: case.run.metadata.file,
    proof=lambda case, _value, _limit: f"the engine is {_engine(case)}",
    fix="Hand it in as OPEN.",
)

rule.limit_rule(
    rule.RunCase,
    id="vectors.closed_index",
    title="In CLOSED the index is one of the edition's",
    **VECTORS,
    source="5.6.3",
    formula="index_type is in the edition's list",
    passes="DISKANN",
    fails="IVF_FLAT",
    not_applicable_if=rule.free_in_open,
    value=lambda case: _index(case) if _index(case) not in case.vectors.closed_indexes else "known",
    compare="==",
    limit="known",
    evidence=lambda case: case.run.summary.file,
    proof=lambda case, _value, _limit: f"the index is {_index(case)}",
    fix="Hand it in as OPEN.",
)


@rule.run_rule(
    id="vectors.parameters",
    title="In CLOSED only keys are set that the division leaves free",
    **VECTORS,
    source="5.6.4",
    formula="every key of override_parameters and args.params is in the edition's list",
    passes="index.M=64",
    fails="dataset.distribution=zipfian",
    not_applicable_if=rule.free_in_open,
)
def _check_parameters(case: rule.RunCase) -> Iterator[Finding]:
    metadata = case.run.metadata
    overrides = metadata.value("override_parameters") if metadata.has("override_parameters") else {}
    params = metadata.value("args", "params") if metadata.has("args", "params") else []
    texts = [
        *(overrides if isinstance(overrides, dict) else ()),
        *(params if isinstance(params, list) else ()),
    ]
    keys = {str(text).partition("=")[0] for text in texts}
    strange = sorted(keys - case.vectors.closed_keys)
    yield pass_if(
        not strange,
        evidence=metadata.file,
        value=len(strange),
        limit=0,
        proof=f"set beyond the list: {', '.join(strange)}" if strange else f"{len(keys)} keys, all are free",
        fix="Hand it in as OPEN, or repeat the runs without them.",
    )


@rule.run_rule(
    id="vectors.open",
    title="In OPEN engine and index are known ones",
    **VECTORS,
    source="5.6.5, a recommendation",
    formula="the index is in one of the edition's lists (else a warning)",
    passes="IVF_FLAT in OPEN",
    fails="TREE in OPEN (a warning)",
)
def _check_open(case: rule.RunCase) -> Iterator[Finding]:
    if case.is_closed:
        yield Finding(verdict=Verdict.PASS, evidence=case.run.summary.file, proof="this is CLOSED")
        return
    known = case.vectors.closed_indexes | case.vectors.open_indexes
    yield pass_if(
        _index(case) in known,
        evidence=case.run.summary.file,
        value=_index(case),
        limit=", ".join(sorted(known)),
        proof=f"the index is {_index(case)}",
        fix="Let the reviewer see what this index is.",
        otherwise=Verdict.WARNING,
    )


@rule.run_rule(
    id="vectors.means",
    title="The rate of a run is that of its ranks",
    **VECTORS,
    source="ours: a stated rate is never trusted",
    formula="sum of the ranks' queries / (last end - first start) == throughput_qps, to the clock's 1e-7",
    passes="4 ranks with 900,000 queries each in 62.6 s, 57,500 a second",
    fails="the same, 63,000 a second",
)
def _check_means(case: rule.RunCase) -> Iterator[Finding]:
    for name, recomputed in vector_search_runs.recompute_run(case.run.aggregate).items():
        stated = case.run.summary.number(name)
        holds = math.isclose(stated, recomputed, rel_tol=_CLOCK_TOLERANCE)
        yield pass_if(
            holds,
            evidence=case.run.summary.file,
            value=repr(stated),
            limit=repr(recomputed),
            proof=f"{name}: stated {stated!r} {'==' if holds else '!='} recomputed {recomputed!r}",
            fix="Restore the files of the run as the benchmark wrote them.",
        )


@rule.run_rule(
    id="vectors.traffic",
    title="The storage was read while vectors were searched",
    **VECTORS,
    source="ours: no rule asks for it, and an index that fits into memory measures none",
    formula="disk_io.total_bytes_read > 0 where it applies to the storage under test (else a warning)",
    passes="total_bytes_read 5,000,000,000",
    fails="total_bytes_read 0 (a warning)",
)
def _check_traffic(case: rule.RunCase) -> Iterator[Finding]:
    aggregate = case.run.aggregate
    if not aggregate.has("disk_io", "total_bytes_read"):
        aggregate.value()
        yield not_applicable(aggregate.file, "it states no traffic")
        return
    read = aggregate.integer("disk_io", "total_bytes_read")
    yield pass_if(
        read > 0,
        evidence=aggregate.file,
        value=f"{read:,} B",
        limit="more than 0 B",
        proof=f"the hosts' own devices read {read:,} B",
        fix="Let the reviewer ask for the traffic at the storage.",
        otherwise=Verdict.WARNING,
    )
