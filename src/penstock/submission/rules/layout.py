"""Rules on a tree whose runs are named by time: which folders and files it has, and how they are called.

A folder too many fails, because the edition's own tool refuses it; a file too many is a warning. What is
wrong with another result's system is a warning here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from penstock.submission.finding import Finding, Verdict
from penstock.submission.names import CONFIG_FOLDER, RESULTS_FILE
from penstock.submission.rules.base import BOTH, LATER, Rule, judged
from penstock.submission.rules.structure import files_finding

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.reading import Result


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


class DatagenLeaf(Rule):
    """The data set was generated once."""

    editions = LATER
    id = "datagen.number"
    title = "The data set was generated once"
    source = "2.1.13"
    formula = "number of leaves in datagen/ == the edition's"
    passes = "datagen/20260701_080000/"
    fails = "two leaves in datagen/"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        found, asked = len(result.datagen), edition.of_time().num_datagen
        yield judged(
            found == asked,
            evidence=result.name,
            value=found,
            limit=asked,
            proof=f"{found} leaves {'==' if found == asked else '!='} {asked}",
            fix="Hand in the leaf of the data set that the runs read.",
        )


class DatagenFiles(Rule):
    """What a generation leaves."""

    editions = LATER
    id = "datagen.files"
    title = "The leaf of the generated data set has its files"
    source = "2.1.14; the JSON files that its text names too are never written by a generation"
    formula = "every pattern of the edition's list matches a file of the leaf"
    passes = "training_datagen.stdout.log, training_datagen.stderr.log, dlio.log"
    fails = "no dlio.log"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each leaf."""
        for leaf in result.datagen:
            yield files_finding(leaf, edition.of_time().datagen_files)


class ConfigFiles(Rule):
    """The configuration's folder."""

    editions = LATER
    benchmarks = BOTH
    id = "runs.configuration"
    title = "The configuration's folder has exactly its files"
    source = "2.1.15, 2.1.20, 2.1.26"
    formula = "the files in dlio_config/ are those of the edition's list"
    passes = "dlio_config/ with config.yaml, hydra.yaml, overrides.yaml"
    fails = "dlio_config/ with config.yaml alone"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each leaf."""
        asked = set(edition.of_time().config_files)
        for leaf in (*result.datagen, *result.jobs()):
            prefix = f"{CONFIG_FOLDER}/"
            found = {name.removeprefix(prefix) for name in leaf.files if name.startswith(prefix)}
            missing, strange = sorted(asked - found), sorted(found - asked)
            told = [f"there is no {name}" for name in missing] + [f"{name} is too much" for name in strange]
            yield judged(
                not told,
                evidence=f"{leaf.name}/{CONFIG_FOLDER}",
                value=f"{len(found)} files",
                limit=", ".join(sorted(asked)),
                proof="; ".join(told) or "exactly its files are there",
                fix="Copy the run's whole output folder, and nothing into it.",
            )


class ResultsFile(Rule):
    """The results' file."""

    editions = LATER
    benchmarks = BOTH
    id = "runs.results"
    title = "The runs have their results.json"
    source = "2.1.16, 2.1.22"
    formula = "results.json is beside the runs, and can be read"
    passes = "run/results.json"
    fails = "no results.json"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding."""
        is_there = result.report.problem != "there is no such file"
        if is_there:
            result.report.value()
        yield judged(
            is_there,
            evidence=result.report.file,
            proof=f"{RESULTS_FILE} {'is' if is_there else 'is not'} there",
            fix="Let `penstock submission report --write` make it.",
        )
