"""Rules about where a result comes from: its program, its edition, and what each result directory states."""

from collections.abc import Iterator

from penstock.errors import DataDamaged, name_some
from penstock.submission.code_image import ALGORITHM, EMPTY_TREE, image_name, parse_pointer
from penstock.submission.finding import Finding, Verdict, not_applicable, not_checked, pass_if, violation
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.result_files import ResultDir
from penstock.submission.rules import rule
from penstock.submission.tree_layout import Benchmark
from penstock.workload.mlperf_divisions import SubmissionDivision


def _pointed_digest(run: ResultDir) -> str:
    """The digest that a result directory points to."""
    try:
        return parse_pointer(str(run.pointer.value()), where=run.pointer.file)
    except DataDamaged as error:
        raise MissingFact(error.what, where=error.where) from error


def _stated_edition(file: ParsedFile) -> str:
    """The edition that a file says it was made for; tools write both 3.0 and v3.0."""
    return f"v{file.text('rules_edition').removeprefix('v')}"


@rule.result_rule(
    id="code.pointer",
    title="Each result directory points to a code image that is there",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="2.1.6, CHECK-01",
    formula=".mlps-code-image names a digest whose image is in the pool",
    passes="md5-tree-v2:0123..., code-images/code-01234567/",
    fails="a result directory without .mlps-code-image",
)
def _check_pointers(case: rule.ResultCase) -> Iterator[Finding]:
    images = {image.name for image in case.result.context.pool.images}
    for run in case.result.all_dirs():
        if run.pointer.is_missing:
            yield violation(
                evidence=run.pointer.file,
                proof="the result directory points to no code image",
                fix="Hand in the result directory as it was written.",
            )
            continue
        try:
            name = image_name(_pointed_digest(run))
        except MissingFact as reason:
            yield not_checked(reason)
            continue
        yield pass_if(
            name in images,
            evidence=run.pointer.file,
            value=name,
            limit="an image of the pool",
            proof=f"{name} {'is' if name in images else 'is not'} in the pool",
            fix="Hand in the pool of code images as it was.",
        )


@rule.result_rule(
    id="code.image",
    title="A code image is what its digest says",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="2.1.6, CHECK-02",
    formula=(
        "digest of its files == .code-hash.json's hash; the folder is named by its first eight digits; "
        "another digest of files that are there was let pass in v3.0 (a warning)"
    ),
    passes="code-01234567/ whose files hash to 01234567...",
    fails="a file changed after the image was taken",
)
def _check_images(case: rule.ResultCase) -> Iterator[Finding]:
    pointed = set()
    for run in case.result.all_dirs():
        try:
            pointed.add(image_name(_pointed_digest(run)))
        except MissingFact:  # the rule on pointers names it
            continue
    images = [image for image in case.result.context.pool.images if image.name in pointed]
    if not images:
        raise MissingFact("no result directory points to a code image that is there", where=case.result.name)
    for image in images:
        stated, algorithm = image.stated.text("hash"), image.stated.text("algorithm")
        if algorithm != ALGORITHM:
            raise MissingFact(f"{algorithm} is not a known algorithm", where=image.stated.file)
        is_hashed_later = (
            bool(image.digest) and image.digest != EMPTY_TREE and image.name == image_name(stated)
        )
        yield pass_if(
            stated == image.digest and image.name == image_name(stated),
            evidence=image.stated.file,
            value=image.digest,
            limit=stated,
            proof=f"{image.name}: its files hash to {image.digest or 'nothing readable'}, it states {stated}",
            fix="Hand in the image as it was taken.",
            # The round's staff took a file out of every image.
            otherwise=case.verdict_of_round if is_hashed_later else Verdict.FAIL,
        )


@rule.result_rule(
    id="code.pool",
    title="Every code image is used",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="CHECK-03; a warning here, since no result depends on it",
    formula="a result directory of the tree points to each image of the pool",
    passes="one image, and result directories that point to it",
    fails="a second image that no result directory points to (a warning)",
)
def _check_pool(case: rule.ResultCase) -> Iterator[Finding]:
    pool = case.result.context.pool
    used = {image_name(digest) for digest in pool.pointed}
    orphans = [image.name for image in pool.images if image.name not in used]
    yield pass_if(
        not orphans,
        evidence=pool.name or case.result.name,
        value=len(orphans),
        limit=0,
        proof=f"nothing points to {', '.join(orphans)}" if orphans else "all images are pointed to",
        fix="Take these out of the pool.",
        otherwise=Verdict.WARNING,
    )


@rule.run_rule(
    id="provenance.run",
    title="A run's provenance names the code image that the run points to",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="PROV-01",
    formula="provenance.json is there if the metadata declare it; tool.code_image == .mlps-code-image",
    passes="both say md5-tree-v2:0123...",
    fails="metadata with provenance_file, and no provenance.json",
)
def _check_provenance(case: rule.RunCase) -> Iterator[Finding]:
    run = case.run
    is_declared = run.metadata.has("provenance_file")
    if run.provenance.is_missing and not is_declared:
        yield not_applicable(run.name, "the run declares no provenance")
    elif run.provenance.is_missing:
        yield violation(
            evidence=run.provenance.file,
            proof="the metadata declare provenance.json, and it is not there",
            fix="Hand in the result directory as it was written.",
        )
    else:
        stated, pointed = run.provenance.text("tool", "code_image"), f"{ALGORITHM}:{_pointed_digest(run)}"
        yield pass_if(
            stated == pointed,
            evidence=run.provenance.file,
            value=stated,
            limit=pointed,
            proof=f"tool.code_image is {stated}, the run points to {pointed}",
            fix="Hand in the result directory as it was written.",
        )


rule.limit_rule(
    rule.RunCase,
    id="provenance.edition",
    title="A run was made by the rules it is judged by",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="EDN-01",
    formula="provenance.json's rules_edition == the edition; older trees without provenance state nothing",
    passes='rules_edition "3.0", judged by v3.0',
    fails='rules_edition "4.0", judged by v3.0',
    not_applicable_if=lambda case: "the run declares no provenance" if case.run.provenance.is_missing else "",
    value=lambda case: _stated_edition(case.run.provenance),
    compare="==",
    limit=lambda case: case.edition.rules,
    evidence=lambda case: case.run.provenance.file,
    proof="made by the rules of {value}, judged by those of {limit}",
    fix="Judge it with --edition {value}, or repeat the run.",
)


@rule.result_rule(
    id="provenance.manifest",
    title="submission.yaml lists exactly the result directories that are there",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="PROV-02",
    formula=(
        "runs[].leaf == the tree's result directories, rules_edition == the edition; not "
        "applicable without the file"
    ),
    passes="9 result directories listed, the same 9 there",
    fails="a result directory that is not listed",
)
def _check_manifest(case: rule.ResultCase) -> Iterator[Finding]:
    manifest = case.result.context.manifest
    if manifest.is_missing:
        yield not_applicable(manifest.file, "there is no submission.yaml")
        return
    runs = manifest.value("runs")
    entries = runs if isinstance(runs, list) else []
    listed = {str(entry.get("leaf")) for entry in entries if isinstance(entry, dict)}
    present = set(case.result.context.result_dirs)
    problems = [f"{name} is not listed" for name in sorted(present - listed)]
    problems += [f"{name} is not there" for name in sorted(listed - present)]
    shown = name_some(problems, separator="; ")
    yield pass_if(
        not problems,
        evidence=manifest.file,
        value=f"{len(listed)} listed",
        limit=f"{len(present)} there",
        proof=shown or f"all {len(present)} result directories are listed",
        fix="Write submission.yaml again, or hand in all result directories.",
    )
    stated = _stated_edition(manifest)
    yield pass_if(
        stated == case.edition.rules,
        evidence=manifest.file,
        value=stated,
        limit=case.edition.rules,
        proof=f"rules_edition is {stated}",
        fix="Write submission.yaml again.",
    )


@rule.result_rule(
    id="runs.metadata",
    title="The metadata of a result directory agree with its path",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="3.1.1, structure of *_metadata.json",
    formula="benchmark_type, model and command are those of the path, run_datetime is the directory's name",
    passes="training/unet3d/run/20260701_100000/ with command run",
    fails="a result directory that was copied from another workload",
)
def _check_metadata(case: rule.ResultCase) -> Iterator[Finding]:
    result = case.result
    phases = (("datasize", result.datasize), ("datagen", result.datagen), ("run", result.run_dirs()))
    for command, directories in phases:
        for directory in directories:
            try:
                yield _judge_metadata_of(directory, case, command)
            except MissingFact as reason:
                yield not_checked(reason)


def _judge_metadata_of(directory: ResultDir, case: rule.ResultCase, command: str) -> Finding:
    location = case.result.location
    model = location.model.lower()
    if location.benchmark is Benchmark.VECTOR_SEARCH:  # its folder is an engine's, and then an index's
        model = f"{location.folder.parent.name.lower()}_{model}"
    expected = {
        "benchmark_type": location.benchmark.value,
        "model": model,
        "command": command,
        "run_datetime": directory.name.rpartition("/")[2],
    }
    stated = {key: directory.metadata.text(key).lower() for key in expected}
    problems = [
        f"{key} is {stated[key]}, not {wanted}" for key, wanted in expected.items() if stated[key] != wanted
    ]
    return pass_if(
        not problems,
        evidence=directory.metadata.file,
        value=f"{len(problems)} differ",
        limit="0 differ",
        proof="; ".join(problems) or f"they say {command} of {stated['model']} at {stated['run_datetime']}",
        fix="Hand in each result directory where it was written.",
    )


rule.limit_rule(
    rule.RunCase,
    id="runs.exit",
    title="Each run succeeded",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="structure of *_metadata.json; the tools of the published round wrote no exit_status",
    formula="metadata.exit_status == 0; not applicable to metadata without it",
    not_applicable_if=lambda case: (
        ""
        if case.run.metadata.problem or case.run.metadata.has("exit_status")
        else "its tool states no exit status"
    ),
    passes="exit_status 0",
    fails="exit_status 1",
    value=lambda case: case.run.metadata.integer("exit_status"),
    compare="==",
    limit=0,
    evidence=lambda case: case.run.metadata.file,
    proof="exit_status is {value}",
    fix="Repeat the run.",
)


@rule.run_rule(
    id="runs.division",
    title="A run in CLOSED was made for CLOSED",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="verdict of the tool in *_metadata.json; case does not matter",
    formula="verification is closed, or the result is in OPEN; another verdict of the tool is a warning",
    passes="closed/, verification CLOSED",
    fails="closed/, verification OPEN",
)
def _check_division(case: rule.RunCase) -> Iterator[Finding]:
    if case.is_query and not case.run.metadata.problem and not case.run.metadata.has("verification"):
        yield not_applicable(case.run.metadata.file, "its tool gives no verdict on this benchmark")
        return
    stated, division = case.run.metadata.text("verification"), case.division
    is_division = stated.lower() in set(SubmissionDivision)
    yield pass_if(
        stated.lower() in {SubmissionDivision.CLOSED.value, division.value},
        evidence=case.run.metadata.file,
        value=stated,
        limit=division.value,
        proof=f"the tool called this run {stated}, it is handed in as {division.value}",
        fix="Hand it in as what it was made for, and see the other findings.",
        otherwise=Verdict.FAIL if is_division else Verdict.WARNING,
    )
