"""What is not judged here: other benchmarks' results are recognised, and said to be outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.submission.finding import Finding, Verdict
from penstock.submission.names import Benchmark
from penstock.submission.rules.base import LATER, Rule

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.reading import Result


class OtherBenchmarks(Rule):
    """Vector search and key-value caches."""

    editions = LATER
    benchmarks = (Benchmark.VECTOR_SEARCH, Benchmark.KV_CACHE)
    id = "scope.benchmark"
    title = "Results of vector search and of key-value caches are not judged"
    source = "sections 5 and 6"
    formula = "not checked: neither valid nor invalid"
    passes = "a folder training/ or checkpointing/, which other rules judge"
    fails = "a folder vector_database/ (not checked)"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding."""
        what = result.place.benchmark.value
        yield Finding(
            verdict=Verdict.NOT_CHECKED,
            evidence=result.name,
            value=what,
            limit="training, checkpointing",
            proof=f"{what} is outside of what Penstock judges",
            fix="Have it judged by the benchmark's own tool.",
        )
