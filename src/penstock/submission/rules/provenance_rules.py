"""Rules on where a result comes from: its program, its edition, and what each leaf says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import DataDamaged
from penstock.submission.code_image import ALGORITHM, image_name, parse_pointer
from penstock.submission.finding import Finding, Verdict
from penstock.submission.parsed_file import Unknown
from penstock.submission.rules.rule import (
    BOTH,
    LATER,
    NEWEST,
    JobRule,
    Rule,
    division_of,
    judged,
    not_applicable,
    not_checked,
)
from penstock.workload.division_rules import SubmissionDivision

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import Job, Result

_ABSENT = "there is no such file"


def _pointed(job: Job) -> str:
    """The digest that a leaf points to."""
    try:
        return parse_pointer(str(job.pointer.value()), where=job.pointer.file)
    except DataDamaged as error:
        raise Unknown(error.what, where=error.where) from error


class Pointer(Rule):
    """Each leaf has its program."""

    editions = NEWEST
    benchmarks = BOTH
    id = "code.pointer"
    title = "Each leaf points to a code image that is there"
    source = "2.1.6, CHECK-01"
    formula = ".mlps-code-image names a digest whose image is in the pool"
    passes = "md5-tree-v2:0123..., code-images/code-01234567/"
    fails = "a leaf without .mlps-code-image"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each leaf of each phase."""
        there = {image.name for image in result.around.pool.images}
        for leaf in result.leaves():
            if leaf.pointer.problem == _ABSENT:
                yield judged(
                    kept=False,
                    evidence=leaf.pointer.file,
                    proof="the leaf points to no code image",
                    fix="Hand in the leaf as it was written.",
                )
                continue
            try:
                name = image_name(_pointed(leaf))
            except Unknown as reason:
                yield not_checked(reason)
                continue
            kept = name in there
            yield judged(
                kept,
                evidence=leaf.pointer.file,
                value=name,
                limit="an image of the pool",
                proof=f"{name} {'is' if kept else 'is not'} in the pool",
                fix="Hand in the pool of code images as it was.",
            )


class Image(Rule):
    """The program is what it says it is."""

    editions = NEWEST
    benchmarks = BOTH
    id = "code.image"
    title = "A code image is what its digest says"
    source = "2.1.6, CHECK-02"
    formula = "digest of its files == .code-hash.json's hash; the folder is called by its first eight digits"
    passes = "code-01234567/ whose files come to 01234567..."
    fails = "a file changed after the image was taken"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each image that the result's leaves point to."""
        pointed = set()
        for leaf in result.leaves():
            try:
                pointed.add(image_name(_pointed(leaf)))
            except Unknown:  # the rule on pointers names it
                continue
        images = [image for image in result.around.pool.images if image.name in pointed]
        if not images:
            raise Unknown("no leaf points to a code image that is there", where=result.name)
        for image in images:
            stated, algorithm = image.stated.text("hash"), image.stated.text("algorithm")
            if algorithm != ALGORITHM:
                raise Unknown(f"{algorithm} is no digest that is known", where=image.stated.file)
            kept = stated == image.digest and image.name == image_name(stated)
            yield judged(
                kept,
                evidence=image.stated.file,
                value=image.digest,
                limit=stated,
                proof=(
                    f"{image.name}: its files come to {image.digest or 'nothing readable'}, it says {stated}"
                ),
                fix="Hand in the image as it was taken.",
            )


class PoolIsUsed(Rule):
    """No image too many."""

    editions = NEWEST
    benchmarks = BOTH
    id = "code.pool"
    title = "Every code image is pointed to"
    source = "CHECK-03; a warning here, since no result depends on it"
    formula = "each image of the pool is pointed to by a leaf of the tree"
    passes = "one image, and leaves that point to it"
    fails = "a second image that nobody points to (a warning)"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for the pool."""
        pool = result.around.pool
        used = {image_name(digest) for digest in pool.pointed}
        orphans = [image.name for image in pool.images if image.name not in used]
        yield judged(
            not orphans,
            evidence=pool.name or result.name,
            value=len(orphans),
            limit=0,
            proof=f"nobody points to {', '.join(orphans)}" if orphans else "all images are pointed to",
            fix="Take these out of the pool.",
            otherwise=Verdict.WARNING,
        )


class Provenance(JobRule):
    """What a leaf says it was made by."""

    editions = NEWEST
    benchmarks = BOTH
    id = "provenance.run"
    title = "A leaf's provenance names the code image that the leaf points to"
    source = "PROV-01"
    formula = "provenance.json is there if the metadata declare it; tool.code_image == .mlps-code-image"
    passes = "both say md5-tree-v2:0123..."
    fails = "metadata with provenance_file, and no provenance.json"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a leaf."""
        declared = job.metadata.has("provenance_file")
        if job.provenance.problem == _ABSENT:
            if not declared:
                yield not_applicable(job.name, "the leaf declares no provenance")
                return
            yield judged(
                kept=False,
                evidence=job.provenance.file,
                proof="the metadata declare provenance.json, and it is not there",
                fix="Hand in the leaf as it was written.",
            )
            return
        stated, pointed = job.provenance.text("tool", "code_image"), f"{ALGORITHM}:{_pointed(job)}"
        yield judged(
            stated == pointed,
            evidence=job.provenance.file,
            value=stated,
            limit=pointed,
            proof=f"tool.code_image is {stated}, the leaf points to {pointed}",
            fix="Hand in the leaf as it was written.",
        )


class StatedEdition(JobRule):
    """The rules a leaf was made by."""

    editions = NEWEST
    benchmarks = BOTH
    id = "provenance.edition"
    title = "A leaf was made by the rules it is judged by"
    source = "EDN-01"
    formula = "provenance.json's rules_edition == the edition; nothing is stated in trees before provenance"
    passes = 'rules_edition "3.0", judged by v3.0'
    fails = 'rules_edition "4.0", judged by v3.0'

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a leaf."""
        if job.provenance.problem == _ABSENT:
            yield not_applicable(job.name, "the leaf declares no provenance")
            return
        stated = f"v{job.provenance.text('rules_edition').removeprefix('v')}"
        yield judged(
            stated == edition.edition,
            evidence=job.provenance.file,
            value=stated,
            limit=edition.edition,
            proof=f"made by the rules of {stated}, judged by those of {edition.edition}",
            fix=f"Judge it with --edition {stated}, or repeat the run.",
        )


class Manifest(Rule):
    """What the submitter's folder says it holds."""

    editions = NEWEST
    benchmarks = BOTH
    id = "provenance.manifest"
    title = "submission.yaml lists exactly the leaves that are there"
    source = "PROV-02"
    formula = (
        "runs[].leaf == the tree's leaves, rules_edition == the edition; nothing is asked without the file"
    )
    passes = "9 leaves listed, the same 9 there"
    fails = "a leaf that is not listed"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for the list, and one for the edition."""
        manifest = result.around.manifest
        if manifest.problem == _ABSENT:
            yield not_applicable(manifest.file, "there is no submission.yaml")
            return
        runs = manifest.value("runs")
        listed = (
            {str(run.get("leaf")) for run in runs if isinstance(run, dict)}
            if isinstance(runs, list)
            else set()
        )
        there = set(result.around.leaves)
        missing, absent = sorted(there - listed), sorted(listed - there)
        told = [f"{leaf} is not listed" for leaf in missing] + [f"{leaf} is not there" for leaf in absent]
        yield judged(
            not told,
            evidence=manifest.file,
            value=f"{len(listed)} listed",
            limit=f"{len(there)} there",
            proof="; ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")
            if told
            else f"all {len(there)} leaves are listed",
            fix="Make submission.yaml anew, or hand in all leaves.",
        )
        stated = f"v{manifest.text('rules_edition').removeprefix('v')}"
        yield judged(
            stated == edition.edition,
            evidence=manifest.file,
            value=stated,
            limit=edition.edition,
            proof=f"rules_edition is {stated}",
            fix="Make submission.yaml anew.",
        )


class Metadata(Rule):
    """What a leaf says it is."""

    editions = LATER
    benchmarks = BOTH
    id = "runs.metadata"
    title = "A leaf's metadata say what its folders say"
    source = "3.1.1, structure of *_metadata.json"
    formula = "benchmark_type, model and command are those of the path, run_datetime is the leaf's name"
    passes = "training/unet3d/run/20260701_100000/ with command run"
    fails = "a leaf that was copied from another workload"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each leaf."""
        phases = (("datasize", result.datasize), ("datagen", result.datagen), ("run", result.jobs()))
        for command, leaves in phases:
            for leaf in leaves:
                try:
                    yield self._leaf(leaf, result, command)
                except Unknown as reason:
                    yield not_checked(reason)

    def _leaf(self, leaf: Job, result: Result, command: str) -> Finding:
        asked = {
            "benchmark_type": result.place.benchmark.value,
            "model": result.place.model.lower(),
            "command": command,
            "run_datetime": leaf.name.rpartition("/")[2],
        }
        stated = {key: leaf.metadata.text(key).lower() for key in asked}
        told = [f"{key} is {stated[key]}, not {asked[key]}" for key in asked if stated[key] != asked[key]]
        return judged(
            not told,
            evidence=leaf.metadata.file,
            value=f"{len(told)} differ",
            limit="0 differ",
            proof="; ".join(told) or f"they say {command} of {stated['model']} at {stated['run_datetime']}",
            fix="Hand in each leaf where it was written.",
        )


class ExitStatus(JobRule):
    """How the run ended."""

    editions = NEWEST
    benchmarks = BOTH
    id = "runs.exit"
    title = "Each run ended well"
    source = "structure of *_metadata.json; a launcher that fails leaves no result"
    formula = "metadata.exit_status == 0"
    passes = "exit_status 0"
    fails = "exit_status 1"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a leaf."""
        status = job.metadata.whole("exit_status")
        yield judged(
            status == 0,
            evidence=job.metadata.file,
            value=status,
            limit=0,
            proof=f"exit_status is {status}",
            fix="Repeat the run.",
        )


class StatedDivision(JobRule):
    """Which division a run was made for."""

    editions = LATER
    benchmarks = BOTH
    id = "runs.division"
    title = "A run in CLOSED was made for CLOSED"
    source = "verdict of the tool in *_metadata.json; case does not matter"
    formula = "verification is closed, or the result is in OPEN; another verdict of the tool is a warning"
    passes = "closed/, verification CLOSED"
    fails = "closed/, verification OPEN"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a leaf."""
        said, division = job.metadata.text("verification"), division_of(result)
        kept = said.lower() in {SubmissionDivision.CLOSED.value, division.value}
        is_division = said.lower() in set(SubmissionDivision)
        yield judged(
            kept,
            evidence=job.metadata.file,
            value=said,
            limit=division.value,
            proof=f"the tool called this run {said}, it is handed in as {division.value}",
            fix="Hand it in as what it was made for, and see the other findings.",
            otherwise=Verdict.FAIL if is_division else Verdict.WARNING,
        )
