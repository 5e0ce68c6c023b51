"""Rules on a tree whose runs are named by time: which folders and files it has, and how they are called.

A folder too many fails, because the edition's own tool refuses it; a file too many is a warning. What is
wrong with another result's system is a warning here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from penstock.submission.find_results import folders_of
from penstock.submission.finding import Finding, Verdict
from penstock.submission.rules.rule import ALL, BOTH, LATER, Rule, judged
from penstock.submission.tree_layout import Benchmark

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import Result


def _beside(where: str, found: Iterable[str], known: frozenset[str]) -> Iterator[Finding]:
    strange = [name for name in found if name.rstrip("/").lower() not in known]
    for name in strange:
        yield judged(
            kept=False,
            evidence=where,
            value=name,
            limit=", ".join(sorted(known)),
            proof=f"{name} is not known here",
            fix="Take it out of the submission.",
            otherwise=Verdict.FAIL if name.endswith("/") else Verdict.WARNING,
        )
    if not strange:
        yield judged(kept=True, evidence=where, proof="nothing else is here")


class Names(Rule):
    """Plain names."""

    editions = LATER
    benchmarks = BOTH
    id = "structure.names"
    title = "Organisation and system have plain names"
    source = "2.1.1"
    formula = "both match the edition's pattern"
    passes = "closed/acme/results/fast-1/"
    fails = "closed/acme & sons/results/fast-1/"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each name."""
        pattern = edition.of_time().name_pattern
        for what, name in (
            ("organisation", result.place.submitter.organisation),
            ("system", result.place.system),
        ):
            kept = re.fullmatch(pattern, name) is not None
            yield judged(
                kept,
                evidence=result.name,
                value=name,
                limit=pattern,
                proof=f"the {what} {name!r} {'matches' if kept else 'does not match'} {pattern}",
                fix="Rename the folder, with - in place of other characters.",
            )


class BesideDivisions(Rule):
    """The top of the tree."""

    editions = LATER
    benchmarks = BOTH
    id = "structure.divisions"
    title = "Nothing but divisions and code images lies at the top of the tree"
    source = "2.1.2; case does not matter, since the diagram of 2.1.27 writes capitals"
    formula = "every folder is of the edition's list (else fail), every file too (else warning)"
    passes = "closed/, open/, code-images/"
    fails = "closed/, backup/"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each strange entry."""
        known = edition.of_time().beside_divisions | {result.around.pool.name.rpartition("/")[2]}
        yield from _beside("the top of the tree", result.around.beside_divisions, known)


class BesideResults(Rule):
    """A submitter's folder."""

    editions = LATER
    benchmarks = BOTH
    id = "structure.submitter"
    title = "Nothing but the edition's folders lies in a submitter's folder"
    source = "2.1.5, CHECK-04: v3.0 keeps code images beside the divisions, and no code/"
    formula = "every folder is of the edition's list (else fail), every file too (else warning)"
    passes = "results/, systems/, submission.yaml"
    fails = "results/, systems/, results_old/"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each strange entry."""
        yield from _beside(result.around.name, result.around.entries, edition.of_time().beside_results)


class SystemFiles(Rule):
    """Descriptions and results."""

    editions = LATER
    benchmarks = BOTH
    id = "structure.systems"
    title = "Each system has results, a description and a document"
    source = "2.1.7, 2.1.8"
    formula = "systems/ holds NAME.yaml and NAME.pdf for each results/NAME/, and nothing else but NAME.md"
    passes = "results/fast/, systems/fast.yaml, systems/fast.pdf"
    fails = "results/fast/, systems/fast.yaml alone"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each thing that is missing or too much."""
        around, system = result.around, result.place.system
        asked = {f"{system}.yaml", f"{system}.pdf"}
        where = f"{around.name}/systems"
        for name in sorted(asked - set(around.systems)):
            yield judged(
                kept=False,
                evidence=where,
                value="missing",
                limit=name,
                proof=f"there is no {name}",
                fix=f"Describe the system in systems/{name}.",
            )
        strange = [name for name in around.systems if not _is_of(name, around.result_systems)]
        for name in strange:
            yield judged(
                kept=False,
                evidence=where,
                value=name,
                proof=f"{name} belongs to no system that has results",
                fix="Take it out, or hand in the results.",
                otherwise=Verdict.FAIL if name.endswith("/") else Verdict.WARNING,
            )
        if asked <= set(around.systems) and not strange:
            yield judged(kept=True, evidence=where, proof=f"there are {' and '.join(sorted(asked))}")


def _is_of(name: str, systems: tuple[str, ...]) -> bool:
    return any(name == f"{system}.{suffix}" for system in systems for suffix in ("yaml", "pdf", "md"))


class Categories(Rule):
    """Kinds of results."""

    editions = LATER
    benchmarks = BOTH
    id = "structure.categories"
    title = "A system's results are sorted by benchmark"
    source = "2.1.10; vector_database and kv_cache are known, as in its diagram"
    formula = "each folder of results/SYSTEM/ is of the edition's list; case does not matter"
    passes = "results/fast/training/"
    fails = "results/fast/trainings/ beside it"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        known = edition.of_time().categories
        prefix = f"{result.place.system}/"
        here = [name.removeprefix(prefix) for name in result.around.categories if name.startswith(prefix)]
        strange = [name for name in here if name.lower() not in known]
        yield judged(
            not strange,
            evidence=f"{result.around.name}/results/{prefix}",
            value=", ".join(strange),
            limit=", ".join(sorted(known)),
            proof=f"not known here: {', '.join(strange)}" if strange else f"there are {', '.join(here)}",
            fix="Rename or take out these folders.",
        )


class Phases(Rule):
    """Phases of a training."""

    editions = LATER
    id = "structure.phases"
    title = "A training has the leaves of its phases, and no others"
    source = "2.1.12; a datasize leaf may be there or not, since text and tool disagree"
    formula = "the edition's required phases are there, and every folder is a phase"
    passes = "training/unet3d/ with datasize/, datagen/ and run/"
    fails = "training/unet3d/ with run/ alone"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        timed, here = edition.of_time(), frozenset(result.place.phases)
        missing, strange = sorted(timed.required_phases - here), sorted(here - timed.phases)
        told = [f"there is no {name}/" for name in missing] + [f"{name}/ is no phase" for name in strange]
        yield judged(
            not told,
            evidence=result.name,
            value=", ".join(result.place.phases),
            limit=", ".join(sorted(timed.phases)),
            proof="; ".join(told) or f"there are {', '.join(result.place.phases)}",
            fix="Copy the whole folder as the benchmark wrote it.",
        )


class Folders(Rule):
    """A submitter's folders."""

    editions = ALL
    benchmarks = BOTH
    id = "structure.folders"
    title = "A submitter's folder holds the folders of the edition"
    source = "v1.0 rules, structure of a submission; 2.1.5 of later editions"
    formula = "required folders are there (else fail), expected ones too (else warning)"
    passes = "closed/acme/ with code/, results/ and systems/"
    fails = "closed/acme/ without systems/"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for all folders, or one for each that is missing."""
        submitter = result.place.submitter
        there = folders_of(submitter)
        missing = [
            (verdict, name)
            for verdict, names in (
                (Verdict.FAIL, edition.folders.required),
                (Verdict.WARNING, edition.folders.expected),
            )
            for name in names
            if name not in there
        ]
        for verdict, name in missing:
            yield Finding(
                verdict=verdict,
                evidence=submitter.organisation,
                value="missing",
                limit=f"{name}/",
                proof=f"{submitter.organisation}/ has no {name}/",
                fix=f"Add {name}/ beside results/.",
            )
        if not missing:
            yield Finding(
                verdict=Verdict.PASS,
                evidence=submitter.organisation,
                proof=f"there are {', '.join(edition.folders.required + edition.folders.expected)}",
            )


class StrayFiles(Rule):
    """Noise."""

    editions = ALL
    benchmarks = BOTH
    id = "structure.stray"
    title = "Nothing but runs and their report lies in a result's folder"
    source = "ours: real trees hold such things, and no edition decides them"
    formula = "every entry is a run, runs/ or the report; others are named, and never fatal"
    passes = "run1 ... run5 and mlperf_storage_report.json"
    fails = "output.txt beside run1 (a warning)"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """A warning that names what is not known."""
        stray = result.place.stray
        yield Finding(
            verdict=Verdict.WARNING if stray else Verdict.PASS,
            evidence=result.name,
            value=str(len(stray)),
            limit="0",
            proof=f"not known here: {', '.join(stray)}" if stray else "nothing else is here",
            fix="Take these out of the submission, unless a reviewer needs them." if stray else "",
        )


class Description(Rule):
    """The system's description."""

    id = "structure.system"
    title = "A system's description is there and can be read"
    source = "v1.0 rules, system description (which has no fixed schema in this edition)"
    formula = "systems/<system>.json is JSON; another name, or a flaw that hides nothing, is a warning"
    passes = "results/fast/unet3d_h100/ and systems/fast.json"
    fails = "results/fast/unet3d_h100/, and systems/ holds no .json"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each description."""
        place = result.place
        if not result.systems:
            yield Finding(
                verdict=Verdict.FAIL,
                evidence=place.submitter.organisation,
                value="no description",
                limit="one",
                proof="systems/ holds no .json",
                fix=f"Describe the system in systems/{place.system or 'NAME'}.json.",
            )
        for system in result.systems:
            system.value()
            named = not place.system or system.file.endswith(f"/{place.system}.json")
            remark = system.remark or ("" if named else f"the results call the system {place.system}")
            yield Finding(
                verdict=Verdict.WARNING if remark else Verdict.PASS,
                evidence=system.file,
                proof=remark or "it can be read",
                fix="Mend the file or its name." if remark else "",
            )


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
