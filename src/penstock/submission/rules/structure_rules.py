"""Rules about the tree: which folders and files it has and what they are called.

A folder that the edition does not know fails, because the edition's own tool refuses it; a file that it does
not know is a warning. What is wrong with the system of another result is a warning here.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.submission.find_results import list_folders
from penstock.submission.finding import Finding, Verdict, pass_if, violation
from penstock.submission.parsed_file import KeyPath
from penstock.submission.rules import rule
from penstock.submission.tree_layout import Benchmark, SubmissionPhase


@rule.result_rule(
    id="scope.benchmark",
    title="Results of vector search and of key-value caches are not judged by editions without their rules",
    editions=("v2.0",),
    benchmarks=(Benchmark.VECTOR_SEARCH, Benchmark.KV_CACHE),
    source="sections 5 and 6",
    formula="not checked: neither valid nor invalid",
    passes="a folder training/ or checkpointing/, which other rules judge",
    fails="a folder vector_database/ in v2.0 (not checked)",
)
def _check_benchmark(case: rule.ResultCase) -> Iterator[Finding]:
    """Results that Penstock recognises but does not judge."""
    benchmark = case.result.location.benchmark.value
    yield violation(
        verdict=Verdict.NOT_CHECKED,
        evidence=case.result.name,
        value=benchmark,
        limit="training, checkpointing",
        proof=f"{case.edition.edition} has no rules for {benchmark}",
        fix="Have it judged by the benchmark's own tool.",
    )


@rule.result_rule(
    id="structure.names",
    title="Organisation and system have plain names",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="2.1.1",
    formula="both match the edition's pattern",
    passes="closed/acme/results/fast-1/",
    fails="closed/acme & sons/results/fast-1/",
)
def _check_names(case: rule.ResultCase) -> Iterator[Finding]:
    location, pattern = case.result.location, case.timed.name_pattern
    for kind, name in (("organisation", location.submitter.organisation), ("system", location.system)):
        holds = re.fullmatch(pattern, name) is not None
        yield pass_if(
            holds,
            evidence=case.result.name,
            value=name,
            limit=pattern,
            proof=f"the {kind} {name!r} {'matches' if holds else 'does not match'} {pattern}",
            fix="Rename the folder, with - in place of other characters.",
        )


@rule.result_rule(
    id="structure.divisions",
    title="The top of the tree holds only divisions and code images",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="2.1.2; case does not matter, since the diagram of 2.1.27 writes capitals",
    formula=(
        "every folder is a pool of code images or in the edition's list (else fail), every file too (else "
        "warning); among several submitters a folder is a warning, and a file is nobody's"
    ),
    passes="closed/, open/, code-images/",
    fails="closed/, backup/",
)
def _check_top_folder(case: rule.ResultCase) -> Iterator[Finding]:
    context = case.result.context
    # Readers of a merged round need its own documents, and files are no part of any result.
    entries = [name for name in context.beside_divisions if name.endswith("/") or not context.is_merged]
    yield from _unknown_entries(
        "the top of the tree",
        entries,
        case.timed.beside_divisions,
        # Of several submitters none is to blame for it.
        of_folder=Verdict.WARNING if context.is_merged else Verdict.FAIL,
    )


@rule.result_rule(
    id="structure.submitter",
    title="A submitter's folder holds only the edition's folders",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="2.1.5, CHECK-04: v3.0 keeps code images beside the divisions, and no code/",
    formula="every folder is in the edition's list (else fail), every file too (else warning)",
    passes="results/, systems/, submission.yaml",
    fails="results/, systems/, results_old/",
)
def _check_submitter_folder(case: rule.ResultCase) -> Iterator[Finding]:
    context = case.result.context
    yield from _unknown_entries(context.name, context.entries, case.timed.beside_results)


def _unknown_entries(
    folder: str, entries: Iterable[str], known: frozenset[str], *, of_folder: Verdict = Verdict.FAIL
) -> Iterator[Finding]:
    unknown = [name for name in entries if name.rstrip("/").lower() not in known]
    for name in unknown:
        yield violation(
            evidence=folder,
            value=name,
            limit=", ".join(sorted(known)),
            proof=f"{name} is not known here",
            fix="Take it out of the submission.",
            verdict=of_folder if name.endswith("/") else Verdict.WARNING,
        )
    if not unknown:
        yield Finding(verdict=Verdict.PASS, evidence=folder, proof="nothing else is here")


def _verdict_on_entry(name: str) -> Verdict:
    """What an unknown entry comes to; folders end in a slash."""
    return Verdict.FAIL if name.endswith("/") else Verdict.WARNING


@rule.result_rule(
    id="structure.folders",
    title="A submitter's folder holds the folders of the edition",
    editions=rule.ALL,
    benchmarks=rule.EVERY,
    source="v1.0 rules, structure of a submission; 2.1.5 of later editions",
    formula="required folders are there (else fail), expected ones too (else warning)",
    passes="closed/acme/ with code/, results/ and systems/",
    fails="closed/acme/ without systems/",
)
def _check_required_folders(case: rule.ResultCase) -> Iterator[Finding]:
    submitter, folders = case.result.location.submitter, case.edition.folders
    present = list_folders(submitter)
    is_complete = True
    for verdict, names in ((Verdict.FAIL, folders.required), (Verdict.WARNING, folders.expected)):
        for name in names:
            if name not in present:
                is_complete = False
                # Among the results it is misplaced, but a reviewer has it.
                elsewhere = case.result.systems[0].file if name == "systems" and case.result.systems else ""
                yield violation(
                    verdict=Verdict.WARNING if elsewhere else verdict,
                    evidence=submitter.organisation,
                    value=elsewhere or "missing",
                    limit=f"{name}/",
                    proof=f"{submitter.organisation}/ has no {name}/"
                    + (f", its description is {elsewhere}" if elsewhere else ""),
                    fix=f"Add {name}/ beside results/.",
                )
    if is_complete:
        yield Finding(
            verdict=Verdict.PASS,
            evidence=submitter.organisation,
            proof=f"there are {', '.join(folders.required + folders.expected)}",
        )


@rule.result_rule(
    id="structure.systems",
    title="Each system has results, a description and a document",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="2.1.7, 2.1.8",
    formula="systems/ holds NAME.yaml and NAME.pdf for each results/NAME/, and nothing else but NAME.md",
    passes="results/fast/, systems/fast.yaml, systems/fast.pdf",
    fails="results/fast/, systems/fast.yaml alone",
)
def _check_system_files(case: rule.ResultCase) -> Iterator[Finding]:
    context, system = case.result.context, case.result.location.system
    folder, required = f"{context.name}/systems", {f"{system}.yaml", f"{system}.pdf"}
    allowed = {
        f"{name}.{suffix}".lower() for name in context.result_systems for suffix in ("yaml", "pdf", "md")
    }
    present = {name.lower() for name in context.systems}
    missing = sorted(name for name in required if name.lower() not in present)
    unknown = [name for name in context.systems if name.lower() not in allowed and not name.endswith(".md")]
    for name in missing:
        yield violation(
            evidence=folder,
            value="missing",
            limit=name,
            proof=f"there is no {name}",
            fix=f"Describe the system in systems/{name}.",
        )
    for name in unknown:
        yield violation(
            evidence=folder,
            value=name,
            proof=f"{name} belongs to no system that has results",
            fix="Take it out, or hand in the results.",
            verdict=_verdict_on_entry(name),
        )
    if not missing and not unknown:
        yield Finding(
            verdict=Verdict.PASS, evidence=folder, proof=f"there are {' and '.join(sorted(required))}"
        )


@rule.result_rule(
    id="structure.categories",
    title="A system's results are sorted by benchmark",
    editions=rule.LATER,
    benchmarks=rule.EVERY,
    source="2.1.10; vector_database and kv_cache are known, as in its diagram",
    formula="each folder of results/SYSTEM/ is in the edition's list; case does not matter",
    passes="results/fast/training/",
    fails="results/fast/trainings/ beside it",
)
def _check_categories(case: rule.ResultCase) -> Iterator[Finding]:
    context, prefix = case.result.context, f"{case.result.location.system}/"
    folders = [name.removeprefix(prefix) for name in context.categories if name.startswith(prefix)]
    unknown = [name for name in folders if name.lower() not in case.timed.categories]
    yield pass_if(
        not unknown,
        evidence=f"{context.name}/results/{prefix}",
        value=", ".join(unknown),
        limit=", ".join(sorted(case.timed.categories)),
        proof=f"not known here: {', '.join(unknown)}" if unknown else f"there are {', '.join(folders)}",
        fix="Rename these folders, or take them out.",
    )


@rule.result_rule(
    id="structure.phases",
    title="A training has the folders of its phases, and no others",
    editions=rule.LATER,
    source="2.1.12; in v2.0 datasize/ may be there or not, since text and tool disagree",
    formula=(
        "the edition's required phases are there, and every folder is a phase; in v3.0 a datasize/ that is "
        "missing was let pass (a warning)"
    ),
    passes="training/unet3d/ with datasize/, datagen/ and run/",
    fails="training/unet3d/ with run/ alone",
)
def _check_phases(case: rule.ResultCase) -> Iterator[Finding]:
    folders = case.result.location.phases
    missing = sorted(case.timed.required_phases - set(folders))
    unknown = sorted(set(folders) - case.timed.phases)
    problems = [f"there is no {name}/" for name in missing] + [f"{name}/ is not a phase" for name in unknown]
    is_let_pass = missing == [SubmissionPhase.DATASIZE] and not unknown
    yield pass_if(
        not problems,
        evidence=case.result.name,
        value=", ".join(folders),
        limit=", ".join(sorted(case.timed.phases)),
        proof="; ".join(problems) or f"there are {', '.join(folders)}",
        fix="Copy the whole folder as the benchmark wrote it.",
        otherwise=case.verdict_of_round if is_let_pass else Verdict.FAIL,
    )


@rule.result_rule(
    id="structure.stray",
    title="A result's folder holds only runs and their report",
    editions=rule.ALL,
    benchmarks=rule.EVERY,
    source="ours: real trees hold other files, and no edition decides about them",
    formula="every entry is a run, runs/ or the report, and no run has links; others are named, never fatal",
    passes="run1 ... run5 and mlperf_storage_report.json",
    fails="output.txt beside run1 (a warning)",
)
def _check_stray_files(case: rule.ResultCase) -> Iterator[Finding]:
    stray = case.result.location.stray
    yield pass_if(
        not stray,
        evidence=case.result.name,
        value=len(stray),
        limit=0,
        proof=f"not known here: {', '.join(stray)}" if stray else "nothing else is here",
        fix="Take these out of the submission, unless a reviewer needs them.",
        otherwise=Verdict.WARNING,
    )


@rule.result_rule(
    id="structure.system",
    title="A system's description is there and can be read",
    editions=rule.FIRST,
    source="v1.0 rules, system description (which has no fixed schema in this edition)",
    formula=(
        "systems/<system>.json is JSON; another name, a flaw that hides nothing, no fact at all, or a "
        "capacity of DRAM that is no positive number is a warning"
    ),
    passes="results/fast/unet3d_h100/ and systems/fast.json",
    fails="results/fast/unet3d_h100/, and systems/ holds no .json",
)
def _check_description_file(case: rule.ResultCase) -> Iterator[Finding]:
    location = case.result.location
    if not case.result.systems:
        yield violation(
            evidence=location.submitter.organisation,
            value="no description",
            limit="one",
            proof="systems/ holds no .json",
            fix=f"Describe the system in systems/{location.system or 'NAME'}.json.",
        )
    for system in case.result.systems:
        system.value()
        is_named = (
            not location.system or system.file.rpartition("/")[2].lower() == f"{location.system}.json".lower()
        )
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
    """What no reader of a description could use; "" if there is nothing of the kind."""
    facts = list(_facts(description, ()))
    if not facts:
        return "it states no fact"
    for path, value in facts:
        is_memory = "dram" in map(str.lower, path) and path[-1].lower().startswith("capacity")
        if is_memory and not _is_positive(value):
            return f"{'.'.join(path)} is {value!r:.40}, no positive number"
    return ""


def _facts(tree: Any, above: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """The values that are not empty, with the keys and the positions in lists above them."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _facts(value, (*above, str(key)))
    elif tree not in (None, ""):
        yield above, tree


def _is_positive(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and 0 < float(value) < math.inf
    except (TypeError, ValueError, OverflowError):
        return False
