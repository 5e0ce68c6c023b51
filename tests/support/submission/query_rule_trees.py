"""The trees of rules about key-value caches and vector search; see `timed_rule_trees`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from tests.support.submission import tree_changes as do
from tests.support.submission.query_tree import CACHE, valid_cache, valid_vectors
from tests.support.submission.rule_trees import RuleTree
from tests.support.submission.timed_cases import FAIL, NA, NEW, PASS, STRICT, UNKNOWN, WARNING
from tests.support.submission.timed_tree import Round
from tests.support.submission.tree_changes import Change


def _case(make: Callable[[], Round]) -> Callable[..., RuleTree[Round]]:
    def of_edition(edition: str) -> Round:
        return replace(make(), edition=edition)

    def case(
        name: str, change: Change, verdict: Any = FAIL, editions: tuple[str, ...] = NEW
    ) -> RuleTree[Round]:
        return RuleTree(name=name, make=of_edition, change=change, verdict=verdict, editions=editions)

    return case


_cache, _vectors = _case(valid_cache), _case(valid_vectors)


def _run_file(tree: Round, suffix: str, number: int = 0) -> Any:
    paths = sorted(path for path in tree.files if "/run/" in path and path.endswith(suffix))
    return tree.files[paths[number]]


def _summary(number: int = 0, **values: Any) -> Change:
    return lambda tree: _run_file(tree, "/summary.json", number).update(values)


def _option(name: str, value: Any, option: str = "3") -> Change:
    return lambda tree: _run_file(tree, "/summary.json")["options"][option].update({name: value})


def _metadata(number: int = 0, **values: Any) -> Change:
    return lambda tree: _run_file(tree, "_metadata.json", number).update(values)


def _args(number: int = 0, **values: Any) -> Change:
    return lambda tree: _run_file(tree, "_metadata.json", number)["args"].update(values)


def _commands(old: str, new: str) -> Change:
    def change(tree: Round) -> None:
        for entry in _run_file(tree, "_metadata.json")["command_output_files"]:
            entry["command"] = entry["command"].replace(old, new)

    return change


def _aggregate(number: int = 0, **values: Any) -> Change:
    return lambda tree: _run_file(tree, "vdb_multi_node_summary.json", number).update(values)


def _totals(queries: float, seconds: float) -> Change:
    def change(tree: Round) -> None:
        aggregate = _run_file(tree, "vdb_multi_node_summary.json")
        del aggregate["rank_summaries"]
        aggregate.update(total_queries=queries, total_time_seconds=seconds)

    return change


def _loading(**values: Any) -> Change:
    def change(tree: Round) -> None:
        path = next(path for path in tree.files if "/datagen/" in path and path.endswith("/summary.json"))
        tree.files[path].update(values)

    return change


def _to_open(tree: Round) -> None:
    tree.division = "open"


def _in_memory(tree: Round, rank: str = "") -> None:
    for path, value in tree.files.items():
        if f"option_2/trial_0/rank_{rank}" in path:
            value["summary"]["cache_stats"]["storage_entries"] = 0


def _renamed_summary(tree: Round) -> None:
    path = next(path for path in tree.files if path.endswith("/summary.json"))
    time = path.split("/")[-2]
    tree.rename("/summary.json", f"/kvcache_run_summary_{time}.json")


def _second_run(tree: Round) -> None:
    tree.files |= {
        path.replace("20260701_100000", "20260701_120000"): value
        for path, value in tree.files.items()
        if CACHE in path
    }


def _share_cache(tree: Round) -> None:
    for entry in _run_file(tree, "_metadata.json")["command_output_files"]:
        output = entry["command"].partition("--rank-output-base ")[2].split(" ")[0]
        entry["command"] = entry["command"].replace("/mnt/cache", output)


_NO_TIME: Final = {"total_queries": 1, "start_time": 2.0, "end_time": 1.0}
QUERY_TREES: Final[Mapping[str, tuple[RuleTree[Round], ...]]] = MappingProxyType(
    {
        "kvcache.files": (
            _cache("the old name", _renamed_summary),
            _cache("no summary", do.drop("/summary.json")),
            _cache("no metadata", do.drop("_metadata.json")),
        ),
        "kvcache.runs": (
            _cache("two", _second_run, WARNING),
            _cache("none", do.together(do.drop("/run/"), do.add(f"{CACHE}/results.json", {})), UNKNOWN),
        ),
        "kvcache.complete": (
            _cache("partial", _summary(partial_failure=True), WARNING),
            _cache("files of ranks", _option("missing_files", ["a", "b"]), WARNING),
            _cache("launches", _summary(trial_failures={"1": [1]}), WARNING),
        ),
        "kvcache.table": (
            _cache("memory", _commands("--cpu-mem-gb 4", "--cpu-mem-gb 32")),
            _cache("a model", _commands("llama3.1-70b-instruct", "tiny-1b")),
            _cache("no number", _commands("--duration 300", "--duration long")),
            _cache("in OPEN", do.together(_commands("--cpu-mem-gb 4", "--cpu-mem-gb 32"), _to_open), NA),
            _cache("no commands", _metadata(command_output_files=[]), UNKNOWN),
            _cache("cut off", _metadata(command_output_files=[{"command": "option_1/trial_0 '"}]), UNKNOWN),
        ),
        "kvcache.sequence": (
            _cache("another seed", _commands("--seed-base 42", "--seed-base 43")),
            _cache("no delay", _args(inter_option_delay=0)),
            _cache("an unstated delay", _args(inter_option_delay=None), PASS),
            _cache("started directly", _commands("--seed-base 42", "--seed 42"), PASS),
            _cache("a configuration", _args(config="mine.yaml")),
            _cache(
                "a trial less",
                lambda tree: _run_file(tree, "_metadata.json")["command_output_files"].pop(),
            ),
            _cache("in OPEN", do.together(_args(inter_option_delay=0), _to_open), NA),
        ),
        "kvcache.autoscaling": (
            _cache("on", _commands("--seed-base 42", "--seed-base 42 --enable-autoscaling")),
            _cache("in OPEN", _to_open, NA),
        ),
        "kvcache.ranks": (
            _cache("uneven", _summary(npernode=3)),
            _cache("fewer launched", _commands("-n 4", "-n 2")),
            _cache("with an equals sign", _commands("-n 4", "-n=4"), PASS),
            _cache("by a launcher that is not told", _commands("-n 4 ", ""), PASS),
        ),
        "kvcache.users": (
            _cache("divided", _commands("--num-users 200", "--num-users 50")),
            _cache("in OPEN", do.together(_commands("--num-users 200", "--num-users 50"), _to_open), NA),
        ),
        "kvcache.isolation": (
            _cache("one folder", _commands("option_1/trial_1 ", "option_1/trial_0 ")),
            _cache("no cache", _commands("--rank-cache-base /mnt/cache ", "")),
            _cache("a cache among results", _share_cache),
        ),
        "kvcache.shared": (
            _cache("rank 0 alone", lambda tree: [tree.drop(f"/rank_{n}/") for n in (1, 2, 3)]),
            _cache(
                "probed",
                do.together(
                    do.drop("/rank_"),
                    lambda tree: _run_file(tree, "_metadata.json")["command_output_files"].append(
                        {"command": "python3 -c .fs_probe"}
                    ),
                ),
                PASS,
            ),
            _cache("unsaid", do.drop("/rank_"), UNKNOWN),
            _cache(
                "some are known to be lost",
                do.together(do.drop("/rank_3/"), _summary(partial_failure=True)),
                WARNING,
            ),
        ),
        "kvcache.bandwidth": (
            _cache("too much", _option("aggregated_read_bandwidth_gbps", 99.0)),
            _cache("no ranks", do.drop("/rank_"), UNKNOWN),
        ),
        "kvcache.tokens": (
            _cache("too many", _option("aggregated_storage_throughput_tokens_per_sec", 9999.0)),
        ),
        "kvcache.latency": (_cache("an average", _option("aggregated_p95_latency_ms", 1000.0)),),
        "kvcache.tiers": (
            _cache("all ranks", _in_memory),
            _cache("one rank", lambda tree: _in_memory(tree, "1"), WARNING),
            _cache("as stated", _option("cpu_tier_ranks", [0, 1, 2, 3])),
        ),
        "kvcache.headline": (
            _cache("an option less", lambda tree: _run_file(tree, "/summary.json")["options"].pop("3")),
            _cache("no latency", _option("aggregated_p95_latency_ms", None)),
            _cache("no mapping", _summary(options=[1]), UNKNOWN),
        ),
        "kvcache.traffic": (_cache("nothing read", _option("aggregated_read_bandwidth_gbps", 0.0)),),
        "kvcache.gateway": (
            _cache("objects", _args(cache_dir="s3://bucket/cache")),
            _cache(
                "a gateway",
                lambda tree: tree.system()["solution"]["architecture"].update(product_API="object"),
                WARNING,
            ),
        ),
        "kvcache.closed": (
            _cache("a flag", _commands("--seed-base 42", "--seed-base 42 --performance-profile latency")),
            _cache("parameters", _args(params=["x=1"])),
            _cache("in OPEN", do.together(_args(params=["x=1"]), _to_open), NA),
        ),
        "vectors.runs": (_vectors("four", do.drop("/run/20260701_100000/")),),
        "vectors.files": (
            _vectors("no summary", do.drop("/summary.json"), WARNING),
            _vectors(
                "no figures", lambda tree: [tree.drop(n) for n in ("/summary.json", "vdb_multi_node_summary")]
            ),
            _vectors("no metadata", do.drop("_metadata.json")),
        ),
        "vectors.scale": (_vectors("none", _summary(num_vectors=0)),),
        "vectors.dimension": (
            _vectors("loaded with another", _loading(dimension=768)),
            _vectors("asked for another", _args(vector_dim=768)),
            _vectors("no loading", do.drop("/datagen/"), UNKNOWN),
        ),
        "vectors.inserted": (
            _vectors("too few", _loading(inserted_vectors=999_000)),
            _vectors("too many", _summary(inserted_vectors=1_000_001)),
        ),
        "vectors.index": (
            _vectors("another built", _loading(index_type="HNSW")),
            _vectors("another folder", do.rename("milvus/DISKANN", "milvus/HNSW")),
            _vectors("in small letters", do.rename("milvus/DISKANN", "milvus/diskann"), PASS),
        ),
        "vectors.recall": (
            _vectors("none", do.together(_summary(recall=0.0), _aggregate(recall={"mean_recall": 0.0}))),
            _vectors("more than was found", _summary(recall=0.99)),
        ),
        "vectors.queries": (_vectors("too few", _summary(query_count=1000)),),
        "vectors.figures": (
            _vectors("not in order", _summary(p999_latency_ms=1.0)),
            _vectors("none", _summary(p95_latency_ms=0.0)),
            _vectors("missing", lambda tree: _run_file(tree, "/summary.json").pop("p99_latency_ms"), UNKNOWN),
        ),
        "vectors.truth": (
            _vectors("unsaid", do.drop("result_verdict.json"), WARNING),
            _vectors(
                "of one percent",
                lambda tree: _run_file(tree, "result_verdict.json")["flat_setup"].update(coverage=0.01),
            ),
            _vectors(
                "failed", lambda tree: _run_file(tree, "result_verdict.json")["flat_setup"].update(ok=False)
            ),
        ),
        "vectors.backend": (
            _vectors("another in one run", _args(2, storage_type="s3")),
            _vectors(
                "unsaid",
                lambda tree: [
                    _run_file(tree, "_metadata.json", 2)["args"].pop(key)
                    for key in ("data_access_protocol", "storage_type")
                ],
                UNKNOWN,
            ),
        ),
        "vectors.engine": (
            _vectors("another", _args(vdb_engine="pgvector")),
            _vectors("in OPEN", do.together(_args(vdb_engine="pgvector"), _to_open), NA),
        ),
        "vectors.closed_index": (
            _vectors("flat", _summary(index_type="IVF_FLAT")),
            _vectors("in OPEN", _to_open, NA),
        ),
        "vectors.parameters": (
            _vectors("free", _metadata(override_parameters={"index.M": 64}), PASS),
            _vectors("overridden", _metadata(override_parameters={"dataset.distribution": "zipfian"})),
            _vectors("an empty argument", _args(params=""), PASS),
            _vectors("as an argument", _args(params=["dataset.distribution=zipfian"])),
            _vectors("in OPEN", do.together(_args(params=["x=1"]), _to_open), NA),
        ),
        "vectors.open": (
            _vectors("flat in OPEN", do.together(_summary(index_type="IVF_FLAT"), _to_open), PASS),
            _vectors("unknown in OPEN", do.together(_summary(index_type="TREE"), _to_open), WARNING),
        ),
        "vectors.means": (
            _vectors("faster", _summary(throughput_qps=99_999.0)),
            _vectors("no ranks", _aggregate(rank_summaries=[]), UNKNOWN),
            _vectors("totals alone", _totals(1000.0, 10.0)),
            _vectors("totals without time", _totals(1000.0, 0.0), UNKNOWN),
            _vectors(
                "under the other name, deeper",
                do.rename("simple/vdb_multi_node_summary.json", "a/statistics.json"),
                PASS,
            ),
            _vectors("no time", _aggregate(rank_summaries=[_NO_TIME]), UNKNOWN),
        ),
        "vectors.traffic": (
            _vectors("none", _aggregate(disk_io={"total_bytes_read": 0}), WARNING),
            _vectors("unsaid", _aggregate(disk_io={}), PASS),
        ),
        "paths.set": (
            _vectors("storage_root unset", _args(storage_root=None), WARNING),
            _vectors("storage_root unset, in earnest", _args(storage_root=None), FAIL, STRICT),
            _cache("a cache among results", _args(cache_dir="/home/acme/results")),
        ),
        "paths.filesystems": (
            _vectors("vectors, unsaid", do.drop("fs_separation.json"), WARNING),
            _vectors("vectors, unsaid, in earnest", do.drop("fs_separation.json"), FAIL, STRICT),
            _cache("a cache, unsaid", do.drop("fs_separation.json"), WARNING),
        ),
        "runs.metadata": (
            _vectors("another index's", _metadata(model="milvus_HNSW")),
            _cache("another model's", _metadata(model="tiny-1b")),
        ),
        "runs.division": (_cache("no verdict", _metadata(verification=None), NA),),
    }
)
"""By rule; those of all benchmarks are in `timed_rule_trees` as well."""
