"""Rules about the tree, the systems that it describes, and the program that made its results.

A folder that the edition does not list fails, because the edition's own tool refuses it, whereas an unknown
file is only a warning. If something is wrong with the system of another result, that is a warning here.
"""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final

from penstock.errors import name_some
from penstock.submission.code_image import ALGORITHM, EMPTY_TREE, image_name, parse_pointer, pointer_text
from penstock.submission.parsed_file import KeyPath, MissingFact, ParsedFile
from penstock.submission.rules.rule import (
    BOTH,
    EVERY,
    FIRST,
    LATER,
    METADATA,
    NEWEST,
    Case,
    Finding,
    Rule,
    Verdict,
    check,
    limit,
    not_applicable,
    nothing,
    or_pass,
    pass_if,
    require_all_hosts,
)
from penstock.submission.system_description import find_schema_problems
from penstock.submission.tree_layout import (
    REHEARSAL,
    Benchmark,
    SubmissionPhase,
    find_folder,
    list_subfolders,
)
from penstock.workload.mlperf_divisions import SubmissionDivision

SOLUTION: Final = ("system_under_test", "solution")
REHEARSAL_RULE: Final = "runs.rehearsal"
_LATER_TREES: Final[Any] = {"editions": LATER, "benchmarks": EVERY, "each": "result"}
_NEWEST_TREES: Final[Any] = {"editions": NEWEST, "benchmarks": EVERY, "each": "result"}
_NEWEST_RUNS: Final[Any] = {"editions": NEWEST, "benchmarks": EVERY}
_AS_WRITTEN: Final = "Submit the result directory as it was written."


def require_description(case: Case) -> ParsedFile:
    result = case.result
    if not result.systems:
        raise MissingFact(
            f"there is no systems/{result.location.system}.yaml",
            where=result.context.name,
            fix="Describe the system there.",
        )
    return result.systems[0]


def judge_schema(description: ParsedFile) -> Iterable[Finding]:
    """Yield a finding for each problem of a description, or a pass if there is none."""
    found = (
        Finding(
            verdict=Verdict.WARNING if problem.is_accepted else Verdict.FAIL,
            evidence=description.file,
            value=f"line {problem.line}",
            proof=str(problem),
            fix="Let a reviewer confirm it." if problem.is_accepted else "Correct this line.",
        )
        for problem in find_schema_problems(description)
    )
    return or_pass(found, evidence=description.file, proof="all keys and values follow the schema")


def _judge_top_folder(case: Case) -> Iterable[Finding]:
    context = case.result.context
    # Readers of a merged round need its own documents, and files belong to no result.
    entries = [name for name in context.beside_divisions if name.endswith("/") or not context.is_merged]
    # If there are several submitters, an unknown folder cannot be blamed on one of them.
    of_folder = Verdict.WARNING if context.is_merged else Verdict.FAIL
    return _judge_entries("the top of the tree", entries, case.edition.timed.beside_divisions, of_folder)


def _judge_entries(
    folder: str, entries: Iterable[str], known: frozenset[str], of_folder: Verdict
) -> Iterable[Finding]:
    unknown = (
        Finding(
            verdict=of_folder if name.endswith("/") else Verdict.WARNING,
            evidence=folder,
            value=name,
            limit=", ".join(sorted(known)),
            proof=f"{name} is not known here",
            fix="Take it out of the submission.",
        )
        for name in entries
        if name.rstrip("/").lower() not in known
    )
    return or_pass(unknown, evidence=folder, proof="nothing else is here")


def _judge_required_folders(case: Case) -> Iterable[Finding]:
    submitter, edition = case.result.location.submitter, case.edition
    present = {folder.name.lower() for folder in list_subfolders(submitter.folder)}
    expected = dict.fromkeys(edition.required_folders, Verdict.FAIL)
    expected |= dict.fromkeys(edition.expected_folders, Verdict.WARNING)
    missing = []
    for name, verdict in expected.items():
        # A description among the results is misplaced, but the reviewer has it.
        elsewhere = case.result.systems[0].file if name == "systems" and case.result.systems else ""
        if name not in present:
            missing.append(
                Finding(
                    verdict=Verdict.WARNING if elsewhere else verdict,
                    evidence=submitter.organisation,
                    value=elsewhere or "missing",
                    limit=f"{name}/",
                    proof=f"{submitter.organisation}/ has no {name}/"
                    + (f", its description is {elsewhere}" if elsewhere else ""),
                    fix=f"Add {name}/ next to results/.",
                )
            )
    return or_pass(missing, evidence=submitter.organisation, proof=f"there are {', '.join(expected)}")


def _judge_system_files(case: Case) -> Iterable[Finding]:
    context, system = case.result.context, case.result.location.system
    folder, required = f"{context.name}/systems", {f"{system}.yaml", f"{system}.pdf"}
    allowed = {
        f"{name}.{suffix}".lower() for name in context.result_systems for suffix in ("yaml", "pdf", "md")
    }
    present = {name.lower() for name in context.systems}
    found = [
        Finding(
            verdict=Verdict.FAIL,
            evidence=folder,
            value="missing",
            limit=name,
            proof=f"there is no {name}",
            fix=f"Describe the system in systems/{name}.",
        )
        for name in sorted(required)
        if name.lower() not in present
    ]
    found += [
        Finding(
            verdict=Verdict.FAIL if name.endswith("/") else Verdict.WARNING,
            evidence=folder,
            value=name,
            proof=f"{name} belongs to no system that has results",
            fix="Take it out, or submit the results.",
        )
        for name in context.systems
        if name.lower() not in allowed and not name.endswith(".md")
    ]
    return or_pass(found, evidence=folder, proof=f"there are {' and '.join(sorted(required))}")


def _categories(case: Case) -> list[str]:
    results = find_folder(case.result.location.submitter.folder, "results")
    return [folder.name for folder in list_subfolders(find_folder(results, case.result.location.system))]


def _phase_problems(case: Case) -> list[str]:
    present = set(case.result.location.phases)
    missing = sorted(case.edition.timed.required_phases - present)
    unknown = sorted(present - case.edition.timed.phases)
    return [f"there is no {name}/" for name in missing] + [f"{name}/ is not a phase" for name in unknown]


def _judge_description_file(case: Case) -> Iterator[Finding]:
    location = case.result.location
    if not case.result.systems:
        yield Finding(
            verdict=Verdict.FAIL,
            evidence=location.submitter.organisation,
            value="no description",
            limit="one",
            proof="systems/ holds no .json",
            fix=f"Describe the system in systems/{location.system or 'NAME'}.json.",
        )
    for system in case.result.systems:
        system.value()
        name = system.file.rpartition("/")[2].lower()
        is_named = not location.system or name == f"{location.system}.json".lower()
        remark = (
            system.remark
            or ("" if is_named else f"the results call the system {location.system}")
            or _find_flaw(system.content)
        )
        yield pass_if(
            not remark,
            evidence=system.file,
            proof=remark or "it can be read",
            fix="Correct the file or its name.",
            otherwise=Verdict.WARNING,
        )


def _find_flaw(description: Any) -> str:
    """Return the reason why no reader could use a description, or "" if there is none."""
    facts = list(leaves(description))
    for path, value in facts:
        if "dram" in map(str.lower, path) and path[-1].lower().startswith("capacity"):
            try:
                is_positive = not isinstance(value, bool) and 0 < float(value) < math.inf
            except (TypeError, ValueError, OverflowError):
                is_positive = False
            if not is_positive:
                return f"{'.'.join(path)} is {value!r:.40}, no positive number"
    return "" if facts else "it states no fact"


def leaves(tree: Any, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the values that are not empty, each with the keys and list positions above it."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*above, str(key)))
    elif tree not in (None, ""):
        yield above, tree


def _judge_clients(case: Case) -> Iterator[Finding]:
    """Yield a finding for the number of hosts, and one for their memory."""
    summary = case.run.summary
    require_all_hosts(case.run)
    description, hosts = require_description(case), summary.integer("num_hosts")
    clients = list(description.parts("system_under_test", "clients").values())
    if not clients:
        raise MissingFact("system_under_test.clients is not a list", where=description.file)
    expected = sum(client.integer("quantity") for client in clients)
    yield pass_if(
        hosts == expected,
        value=f"{hosts} hosts",
        limit=f"{expected} hosts",
        proof=f"{hosts} hosts in the run, {expected} clients in {description.file}",
        fix="Describe the clients that ran, and how many of them did.",
    )
    if not description.boolean(*SOLUTION, "capabilities", "multi_host"):
        yield pass_if(
            hosts == 1,
            value=f"{hosts} hosts",
            limit="1 host",
            proof=f"{hosts} hosts ran, of a system that serves one",
            fix="Say multi_host: true if the system serves several hosts.",
        )
    # On real clusters, the list of the hosts' memory is doubled or has gaps, and only its sum is right. A
    # mean says something about a host only if all hosts are of one kind.
    if len(clients) == 1 and hosts > 0:
        tolerance = case.edition.timed.memory_tolerance
        described_gib = clients[0].number("chassis", "memory_capacity")
        measured_gib = sum(summary.numbers("host_memory_GB")) / hosts
        holds = abs(measured_gib - described_gib) <= tolerance * described_gib
        yield pass_if(
            holds,
            value=f"{measured_gib:.6g} GiB",
            limit=f"{described_gib:g} GiB +- {tolerance:.0%}",
            proof=(
                f"a host has {measured_gib:.6g} GiB on average, {'within' if holds else 'not within'} "
                f"{tolerance:.0%} of the described {described_gib:g} GiB"
            ),
            fix="Describe the memory of the clients that ran, in GiB.",
        )


def _judge_pointer(case: Case) -> Iterator[Finding]:
    pointer, (_, images, _) = case.run.pointer, case.result.context.pool
    if pointer.is_missing:
        proof = "the result directory points to no code image"
        yield Finding(verdict=Verdict.FAIL, proof=proof, fix=_AS_WRITTEN)
        return
    name = image_name(parse_pointer(pointer))
    yield pass_if(
        name in images,
        value=name,
        limit="an image of the pool",
        proof=f"{name} {'is' if name in images else 'is not'} in the pool",
        fix="Submit the pool of code images as it was.",
    )


def _judge_images(case: Case) -> Iterator[Finding]:
    pointed = set()
    for run in case.result.all_dirs():
        with suppress(MissingFact):  # the rule on pointers names it
            pointed.add(image_name(parse_pointer(run.pointer)))
    _, pool, _ = case.result.context.pool
    images = {name: image for name, image in pool.items() if name in pointed}
    if not images:
        raise MissingFact("no result directory points to a code image that is there", where=case.result.name)
    for name, (statement, digest) in images.items():
        stated, algorithm = statement.text("hash"), statement.text("algorithm")
        if algorithm != ALGORITHM:
            raise MissingFact(f"{algorithm} is not a known algorithm", where=statement.file)
        is_named = name == image_name(stated)
        # The round's staff removed a file from every image.
        is_hashed_later = digest not in ("", EMPTY_TREE) and is_named
        yield pass_if(
            stated == digest and is_named,
            evidence=statement.file,
            value=digest,
            limit=stated,
            proof=f"{name}: its files hash to {digest or 'nothing readable'}, it states {stated}",
            fix="Submit the image as it was taken.",
            otherwise=case.verdict_of_round if is_hashed_later else Verdict.FAIL,
        )


def _judge_provenance(case: Case) -> Iterator[Finding]:
    run = case.run
    if run.provenance.is_missing and not run.metadata.has("provenance_file"):
        yield not_applicable(run.name, "the run declares no provenance")
    elif run.provenance.is_missing:
        proof = "the metadata declare provenance.json, and it is not there"
        yield Finding(verdict=Verdict.FAIL, proof=proof, fix=_AS_WRITTEN)
    else:
        stated, pointed = run.provenance.text("tool", "code_image"), pointer_text(parse_pointer(run.pointer))
        yield pass_if(
            stated == pointed,
            value=stated,
            limit=pointed,
            proof=f"tool.code_image is {stated}, the run points to {pointed}",
            fix=_AS_WRITTEN,
        )


def _stated_edition(file: ParsedFile) -> str:
    """Return the edition for which a file was made, according to the file; tools write both 3.0 and v3.0."""
    return f"v{file.text('rules_edition').removeprefix('v')}"


def _judge_manifest(case: Case) -> Iterator[Finding]:
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
    yield pass_if(
        not problems,
        value=f"{len(listed)} listed",
        limit=f"{len(present)} there",
        proof=name_some(problems, separator="; ") or f"all {len(present)} result directories are listed",
        fix="Write submission.yaml again, or submit all result directories.",
    )
    stated = _stated_edition(manifest)
    yield pass_if(
        stated == case.edition.rules,
        value=stated,
        limit=case.edition.rules,
        proof=f"rules_edition is {stated}",
        fix="Write submission.yaml again.",
    )


def _find_misplaced(case: Case) -> list[str]:
    result, location = case.result, case.result.location
    model = location.model.lower()
    if location.benchmark is Benchmark.VECTOR_SEARCH:  # in the folder of an engine, that of an index
        model = f"{location.folder.parent.name.lower()}_{model}"
    phases = {"datasize": result.datasize, "datagen": result.datagen, "run": result.run_dirs()}
    expected = {
        "benchmark_type": location.benchmark.value,
        "model": model,
        "command": next(name for name, dirs in phases.items() if case.run in dirs),
        "run_datetime": case.run.name.rpartition("/")[2],
    }
    stated = {key: case.run.metadata.text(key).lower() for key in expected}
    return [
        f"{key} is {stated[key]}, not {wanted}" for key, wanted in expected.items() if stated[key] != wanted
    ]


def _unless_no_verdict(case: Case) -> str:
    metadata = case.run.metadata
    is_there = case.run.benchmark in BOTH or metadata.problem or metadata.has("verification")
    return "" if is_there else "its tool gives no verdict on this benchmark"


def _judge_rehearsal(case: Case) -> Iterator[Finding]:
    dirs = case.result.all_dirs()
    rehearsed = [each.metadata for each in dirs if each.metadata.has(REHEARSAL)]
    if not rehearsed:
        yield Finding(verdict=Verdict.PASS, proof="no directory is of a rehearsal")
        return
    is_known = rehearsed[0].has(REHEARSAL, "scale")
    scale = f"{rehearsed[0].number(REHEARSAL, 'scale'):g}" if is_known else "unknown"
    yield Finding(
        verdict=Verdict.FAIL,
        evidence=rehearsed[0].file,
        value=f"scale {scale}",
        limit="scale 1",
        proof=f"{len(rehearsed)} of {len(dirs)} result directories are of a rehearsal, at scale {scale}",
        fix="Make the result at full size with `penstock submission run`, in a tree of its own.",
    )


RULES: Final = (
    check(
        id="scope.benchmark",
        title="Vector search and key-value caches are not judged by editions that have no rules for them",
        editions=("v2.0",),
        benchmarks=(Benchmark.VECTOR_SEARCH, Benchmark.KV_CACHE),
        each="result",
        source="sections 5 and 6",
        formula="not checked: neither valid nor invalid",
        passes="a folder training/ or checkpointing/, which other rules judge",
        fails="a folder vector_database/ in v2.0 (not checked)",
        facts=lambda case: {
            "benchmark": case.result.location.benchmark.value,
            "edition": case.edition.edition,
        },
        holds=lambda _: False,
        show=("{benchmark}", "training, checkpointing"),
        proof="{edition} has no rules for {benchmark}",
        fix="Have it judged by the benchmark's own tool.",
        otherwise=Verdict.NOT_CHECKED,
    ),
    check(
        id="structure.names",
        title="Organization and system have plain names",
        **_LATER_TREES,
        source="2.1.1",
        formula="both match the edition's pattern",
        passes="closed/acme/results/fast-1/",
        fails="closed/acme & sons/results/fast-1/",
        facts=lambda case: (
            {"kind": kind, "name": name, "pattern": case.edition.timed.name_pattern}
            for kind, name in (
                ("organisation", case.result.location.submitter.organisation),
                ("system", case.result.location.system),
            )
        ),
        holds=lambda it: re.fullmatch(it.pattern, it.name) is not None,
        show=("{name}", "{pattern}"),
        proof=lambda it: (
            f"the {it.kind} {it.name!r} "
            f"{'matches' if re.fullmatch(it.pattern, it.name) else 'does not match'} {it.pattern}"
        ),
        fix="Rename the folder, with - in place of other characters.",
    ),
    Rule(
        id="structure.divisions",
        title="The top of the tree holds only divisions and code images",
        **_LATER_TREES,
        source="2.1.2; case does not matter, since the diagram of 2.1.27 writes capitals",
        formula=(
            "every folder is a pool of code images or in the edition's list (else fail), every file too "
            "(else warning); among several submitters an unknown folder is a warning"
        ),
        passes="closed/, open/, code-images/",
        fails="closed/, backup/",
        judge=_judge_top_folder,
    ),
    Rule(
        id="structure.submitter",
        title="A submitter's folder holds only the edition's folders",
        **_LATER_TREES,
        source="2.1.5, CHECK-04: v3.0 keeps code images next to the divisions, and no code/",
        formula="every folder is in the edition's list (else fail), every file too (else warning)",
        passes="results/, systems/, submission.yaml",
        fails="results/, systems/, results_old/",
        judge=lambda case: _judge_entries(
            case.result.context.name,
            case.result.context.entries,
            case.edition.timed.beside_results,
            Verdict.FAIL,
        ),
    ),
    Rule(
        id="structure.folders",
        title="A submitter's folder holds the folders of the edition",
        benchmarks=EVERY,
        each="result",
        source="v1.0 rules, structure of a submission; 2.1.5 of later editions",
        formula="required folders are there (else fail), expected ones too (else warning)",
        passes="closed/acme/ with code/, results/ and systems/",
        fails="closed/acme/ without systems/",
        judge=_judge_required_folders,
    ),
    Rule(
        id="structure.systems",
        title="Each system has results, a description and a document",
        **_LATER_TREES,
        source="2.1.7, 2.1.8",
        formula="systems/ holds NAME.yaml and NAME.pdf for each results/NAME/, and nothing else but NAME.md",
        passes="results/fast/, systems/fast.yaml, systems/fast.pdf",
        fails="results/fast/, systems/fast.yaml alone",
        judge=_judge_system_files,
    ),
    nothing(
        id="structure.categories",
        title="A system's results are sorted by benchmark",
        **_LATER_TREES,
        source="2.1.10; vector_database and kv_cache are known, as in its diagram",
        formula="each folder of results/SYSTEM/ is in the edition's list; case does not matter",
        passes="results/fast/training/",
        fails="results/fast/trainings/ next to it",
        problems=lambda case: (
            name for name in _categories(case) if name.lower() not in case.edition.timed.categories
        ),
        at=lambda case: f"{case.result.context.name}/results/{case.result.location.system}/",
        show=("{problems}", lambda it: ", ".join(sorted(it.case.edition.timed.categories))),
        proof=lambda it: f"there are {', '.join(_categories(it.case))}",
        bad="not known here: {}",
        join=", ".join,
        fix="Rename these folders, or take them out.",
    ),
    nothing(
        id="structure.phases",
        title="A training result has the folders of its phases, and no others",
        editions=LATER,
        each="result",
        source="2.1.12; in v2.0 datasize/ may be there or not, since text and tool disagree",
        formula=(
            "required phases are there, every folder is a phase; no datasize/ was a warning in v3.0's round"
        ),
        passes="training/unet3d/ with datasize/, datagen/ and run/",
        fails="training/unet3d/ with run/ alone",
        problems=_phase_problems,
        show=(
            lambda it: ", ".join(it.case.result.location.phases),
            lambda it: ", ".join(sorted(it.case.edition.timed.phases)),
        ),
        proof=lambda it: f"there are {', '.join(it.case.result.location.phases)}",
        fix="Copy the whole folder as the benchmark wrote it.",
        otherwise=lambda it: (
            it.case.verdict_of_round
            if it.problems == f"there is no {SubmissionPhase.DATASIZE}/"
            else Verdict.FAIL
        ),
    ),
    nothing(
        id="structure.stray",
        title="A result's folder holds only runs and their report",
        benchmarks=EVERY,
        each="result",
        source="ours: real trees hold other files, and no edition decides about them",
        formula="every entry is a run, runs/ or the report, and no run has links (else a warning)",
        passes="run1 ... run5 and mlperf_storage_report.json",
        fails="output.txt next to run1 (a warning)",
        problems=lambda case: case.result.location.stray,
        proof="nothing else is here",
        bad="not known here: {}",
        join=", ".join,
        fix="Take these out of the submission, unless a reviewer needs them.",
        otherwise=Verdict.WARNING,
    ),
    Rule(
        id="structure.system",
        title="A system's description exists and can be read",
        editions=FIRST,
        each="result",
        source="v1.0 rules, system description (which has no fixed schema in this edition)",
        formula=(
            "systems/<system>.json is JSON; a different name, a small flaw, no fact, or a DRAM capacity that "
            "is not a positive number is a warning"
        ),
        passes="results/fast/unet3d_h100/ and systems/fast.json",
        fails="results/fast/unet3d_h100/, and systems/ holds no .json",
        judge=_judge_description_file,
    ),
    Rule(
        id="system.schema",
        title="The description of the system follows its schema",
        **_NEWEST_TREES,
        source="schema of the system's description",
        formula=(
            "every key is known and has a value of its type, and keys that belong together agree. Accepted "
            "by reviewers, and so a warning: null for facts of a server, and a total_rack_units other than "
            "the sum of the parts"
        ),
        passes="deployment: onprem",
        fails="deployment: basement",
        judge=lambda case: judge_schema(require_description(case)),
    ),
    limit(
        id="system.name",
        title="The description names the system as its results do",
        **_NEWEST_TREES,
        source="2.1.8",
        formula="solution.submission_name == the folder in results/",
        passes="results/fast/, submission_name: fast",
        fails="results/fast/, submission_name: faster",
        fact=lambda case: require_description(case).text(*SOLUTION, "submission_name"),
        limit=lambda case: case.result.location.system,
        at=lambda case: require_description(case).file,
        proof="submission_name is {fact}, the results call it {limit}",
        fix="Use one name for both.",
    ),
    Rule(
        id="system.hosts",
        title="The runs used the clients that are described",
        editions=NEWEST,
        benchmarks=BOTH,
        source="2.1.9",
        formula=(
            "num_hosts == sum of the clients' quantities, 1 without multi_host; with one kind of client, a "
            "host's mean memory is its memory_capacity, within the edition's tolerance"
        ),
        passes="2 clients of 256 GiB described, 2 hosts with 512 GiB together",
        fails="2 clients described, 4 hosts in the runs",
        judge=_judge_clients,
    ),
    Rule(
        id="code.pointer",
        title="Each result directory points to an existing code image",
        **_NEWEST_RUNS,
        each="directory",
        source="2.1.6, CHECK-01",
        formula=".mlps-code-image names a digest whose image is in the pool",
        passes="md5-tree-v2:0123..., code-images/code-01234567/",
        fails="a result directory without .mlps-code-image",
        at=attrgetter("run.pointer.file"),
        judge=_judge_pointer,
    ),
    Rule(
        id="code.image",
        title="A code image matches its digest",
        **_NEWEST_TREES,
        source="2.1.6, CHECK-02",
        formula=(
            "digest of its files == .code-hash.json's hash, whose first eight digits name the folder; "
            "another digest of files that are there was a warning in v3.0's round"
        ),
        passes="code-01234567/ whose files hash to 01234567...",
        fails="a file changed after the image was taken",
        judge=_judge_images,
    ),
    nothing(
        id="code.pool",
        title="Every code image is used",
        **_NEWEST_TREES,
        source="CHECK-03; a warning here, since no result depends on it",
        formula="a result directory of the tree points to each image of the pool",
        passes="one image, and result directories that point to it",
        fails="a second image that no result directory points to (a warning)",
        problems=lambda case: sorted(
            set(case.result.context.pool[1]) - set(map(image_name, case.result.context.pool[2]))
        ),
        at=lambda case: case.result.context.pool[0] or case.name,
        proof="all images are pointed to",
        bad="nothing points to {}",
        join=", ".join,
        fix="Take these out of the pool.",
        otherwise=Verdict.WARNING,
    ),
    Rule(
        id="provenance.run",
        title="A run's provenance names the code image that the run points to",
        **_NEWEST_RUNS,
        source="PROV-01",
        formula="provenance.json is there if the metadata declare it; tool.code_image == .mlps-code-image",
        passes="both say md5-tree-v2:0123...",
        fails="metadata with provenance_file, and no provenance.json",
        at=attrgetter("run.provenance.file"),
        judge=_judge_provenance,
    ),
    limit(
        id="provenance.edition",
        title="A run was made under the rules by which it is judged",
        **_NEWEST_RUNS,
        source="EDN-01",
        formula="provenance.json's rules_edition == the edition; not applicable without provenance",
        passes='rules_edition "3.0", judged by v3.0',
        fails='rules_edition "4.0", judged by v3.0',
        unless=lambda case: "the run declares no provenance" if case.run.provenance.is_missing else "",
        fact=lambda case: _stated_edition(case.run.provenance),
        limit=lambda case: case.edition.rules,
        at=attrgetter("run.provenance.file"),
        proof="made by the rules of {fact}, judged by the rules of {limit}",
        fix="Judge it with --edition {fact}, or repeat the run.",
    ),
    Rule(
        id="provenance.manifest",
        title="submission.yaml lists exactly the existing result directories",
        **_NEWEST_TREES,
        source="PROV-02",
        formula=(
            "runs[].leaf == the result directories, rules_edition == the edition; not applicable without it"
        ),
        passes="9 result directories listed, the same 9 there",
        fails="a result directory that is not listed",
        at=attrgetter("result.context.manifest.file"),
        judge=_judge_manifest,
    ),
    nothing(
        id="runs.metadata",
        title="The metadata of a result directory agree with its path",
        editions=LATER,
        benchmarks=EVERY,
        each="directory",
        source="3.1.1, structure of *_metadata.json",
        formula=(
            "benchmark_type, model and command agree with the path, run_datetime is the directory's name"
        ),
        passes="training/unet3d/run/20260701_100000/ with command run",
        fails="a result directory that was copied from another workload",
        problems=_find_misplaced,
        at=METADATA,
        show=("{number} differ", "0 differ"),
        proof=lambda it: "they say {} of {} at {}".format(
            *(it.case.run.metadata.text(key).lower() for key in ("command", "model", "run_datetime"))
        ),
        fix="Submit each result directory where it was written.",
    ),
    limit(
        id="runs.exit",
        title="Each run succeeded",
        **_NEWEST_RUNS,
        source="structure of *_metadata.json; the tools of the published round wrote no exit_status",
        formula="metadata.exit_status == 0; not applicable to metadata without it",
        passes="exit_status 0",
        fails="exit_status 1",
        unless=lambda case: (
            ""
            if case.run.metadata.problem or case.run.metadata.has("exit_status")
            else "its tool states no exit status"
        ),
        fact=lambda case: case.run.metadata.integer("exit_status"),
        limit=0,
        at=METADATA,
        proof="exit_status is {fact}",
        fix="Repeat the run.",
    ),
    check(
        id="runs.division",
        title="A run in CLOSED was made for CLOSED",
        editions=LATER,
        benchmarks=EVERY,
        source="verdict of the tool in *_metadata.json; case does not matter",
        formula="verification is closed, or the result is in OPEN; another verdict of the tool is a warning",
        passes="closed/, verification CLOSED",
        fails="closed/, verification OPEN",
        unless=_unless_no_verdict,
        facts=lambda case: {
            "stated": case.run.metadata.text("verification"),
            "division": case.division.value,
        },
        holds=lambda it: it.stated.lower() in {SubmissionDivision.CLOSED.value, it.division},
        at=METADATA,
        show=("{stated}", "{division}"),
        proof="the tool called this run {stated}, it is submitted as {division}",
        fix="Submit it as what it was made for, and see the other findings.",
        otherwise=lambda it: (
            Verdict.FAIL if it.stated.lower() in set(SubmissionDivision) else Verdict.WARNING
        ),
    ),
    Rule(
        id=REHEARSAL_RULE,
        title="The result is not a rehearsal",
        editions=LATER,
        benchmarks=BOTH,
        each="result",
        source="3.1.2, 4.3.4: sizes are the rules' own",
        formula="no metadata file has the key rehearsal",
        passes="runs of `penstock submission run`",
        fails="runs of `penstock submission rehearse`",
        judge=_judge_rehearsal,
    ),
)
