"""Ways to tamper with a tree of v3.0 on disk, whoever made it, and the finding that each must bring.

Place in the flow: a valid tree's folder -> a copy -> one way -> the finding. Invariant: a way asks only for
files that every valid tree with a closed training has.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.submission.rules.rule import Verdict

_FAIL, _WARNING, _UNKNOWN = Verdict.FAIL, Verdict.WARNING, Verdict.NOT_CHECKED


@dataclass(frozen=True)
class Lying:
    """A tree with one closed training, by its folder."""

    top: Path

    def leaves(self, phase: str) -> list[Path]:
        """The leaves of a phase, in order of time."""
        return sorted(self.top.glob(f"[Cc]losed/*/results/*/training/*/{phase}/*_*"))

    def leaf(self, phase: str = "run") -> Path:
        """The third run, or the only leaf of another phase."""
        found = self.leaves(phase)
        return found[2] if phase == "run" else found[-1]

    def metadata(self, phase: str = "run") -> Path:
        """What a leaf says of itself."""
        (found,) = self.leaf(phase).glob("*_metadata.json")
        return found

    def home(self) -> Path:
        """The submitter's folder."""
        return self.leaf().parents[5]

    def description(self) -> Path:
        """The description of the training's system."""
        return self.home() / "systems" / f"{self.leaf().parents[3].name}.yaml"

    def image(self) -> Path:
        """The code image that the leaf points to."""
        digest = (self.leaf() / ".mlps-code-image").read_text().strip().rpartition(":")[2]
        return self.top / "code-images" / f"code-{digest[:8]}"


Way = Callable[[Lying], object]


@dataclass(frozen=True, kw_only=True)
class Tampering:
    """One way, the rule that must find it, and the verdict that this rule must give."""

    name: str
    rule: str
    way: Way
    verdict: Verdict = _FAIL


def _edit(path: Path, change: Callable[[Any], object]) -> None:
    is_json = path.suffix == ".json"
    found = json.loads(path.read_text()) if is_json else yaml.safe_load(path.read_text())
    change(found)
    path.write_text(json.dumps(found) if is_json else yaml.safe_dump(found))


def _summary(change: Callable[[Any], object]) -> Way:
    return lambda tree: _edit(tree.leaf() / "summary.json", change)


def _metric(change: Callable[[Any], object]) -> Way:
    return _summary(lambda summary: change(summary["metric"]))


def _metadata(change: Callable[[Any], object], phase: str = "run") -> Way:
    return lambda tree: _edit(tree.metadata(phase), change)


def _config(change: Callable[[Any], object]) -> Way:
    return lambda tree: _edit(tree.leaf() / "dlio_config/config.yaml", lambda c: change(c["workload"]))


def _overrides(change: Callable[[Any], object]) -> Way:
    return lambda tree: _edit(tree.leaf() / "dlio_config/overrides.yaml", change)


def _described(change: Callable[[Any], object]) -> Way:
    return lambda tree: _edit(tree.description(), lambda found: change(found["system_under_test"]))


def _record(change: Callable[[Any], object]) -> Way:
    return lambda tree: _edit(tree.leaf() / "run.json", lambda found: change(found["plan"]))


def _times(key: str, factor: float) -> Callable[[Any], object]:
    return lambda found: found.update({key: found[key] * factor})


def _without(name: str) -> Way:
    return lambda tree: (tree.leaf() / name).unlink()


def _remove(phase: str) -> Way:
    return lambda tree: shutil.rmtree(tree.leaf(phase).parent)


def _seventh_run(tree: Lying) -> None:
    last = tree.leaves("run")[-1]
    shutil.copytree(last, last.with_name("29990101_000000"))


def _copied_run(tree: Lying) -> None:
    """One run's files in place of another's, by their own names."""
    source, target = tree.leaves("run")[4], tree.leaf()
    name = target.name
    shutil.rmtree(target)
    shutil.copytree(source, target)
    (found,) = target.glob("*_metadata.json")
    found.rename(found.with_name(found.name.replace(source.name, name)))


def _later(tree: Lying) -> None:
    """All runs from the third on, a year later."""
    for leaf in tree.leaves("run")[2:]:
        (found,) = leaf.glob("*_metadata.json")
        _edit(found, _move)


def _move(metadata: dict[str, Any]) -> None:
    for key in ("invocation_start_time", "invocation_end_time"):
        metadata[key] = (datetime.fromisoformat(metadata[key]) + timedelta(days=365)).isoformat()


def _misspell(metric: dict[str, Any]) -> None:
    metric["train_au_percent"] = metric.pop("train_au_percentage")


def _more_accelerators(summary: dict[str, Any]) -> None:
    summary["num_accelerators"] += 1


def _other_batch(workload: dict[str, Any]) -> None:
    workload["reader"]["batch_size"] += 1


def _other_workload(overrides: list[str]) -> None:
    overrides[:] = [line for line in overrides if not line.startswith("workload=")] + ["workload=bert_v100"]


def _fewer_generated(metadata: dict[str, Any]) -> None:
    """In the whole configuration, and in the sum of it where there is one."""
    for holder in (metadata, metadata["parameters"]):
        holder.get("dataset", {})["num_files_train"] = 1


def _more_sized(metadata: dict[str, Any]) -> None:
    metadata["dataset"]["num_files_train"] += 1


def _same_paths(metadata: dict[str, Any]) -> None:
    metadata["args"]["results_dir"] = metadata["args"]["data_dir"]


def _fewer_in_an_epoch(plan: dict[str, Any]) -> None:
    plan["epochs"][0]["ranks"][0]["samples"] -= 1


def _another_lot(plan: dict[str, Any]) -> None:
    plan["epochs"][0]["ranks"][0]["digest"] = "0123456789abcdef"


def _one_order(plan: dict[str, Any]) -> None:
    plan["shuffle"] = "off"


def _quantity(described: dict[str, Any]) -> None:
    described["clients"][0]["quantity"] += 1


def _change_image(tree: Lying) -> None:
    path = next(path for path in sorted(tree.image().rglob("*.py")) if "test" not in str(path.parent.name))
    path.write_text(f"{path.read_text()}\n# one line more\n")


def _point_elsewhere(tree: Lying) -> None:
    (tree.leaf() / ".mlps-code-image").write_text(f"md5-tree-v2:{'0' * 32}\n")


def _unlist(tree: Lying) -> None:
    _edit(tree.home() / "submission.yaml", lambda found: found["runs"].pop())


def _log_of(tree: Lying) -> None:
    (tree.leaf() / "training_run.stdout.log").unlink()


WAYS: Final[tuple[Tampering, ...]] = (
    Tampering(name="failed run", rule="runs.exit", way=_metadata(lambda m: m.update(exit_status=1))),
    Tampering(
        name="made for open", rule="runs.division", way=_metadata(lambda m: m.update(verification="OPEN"))
    ),
    Tampering(
        name="idle accelerators",
        rule="utilization.minimum",
        way=_metric(lambda m: m.update(train_au_percentage=[10.0 for _ in m["train_au_percentage"]])),
    ),
    Tampering(
        name="more than busy",
        rule="utilization.maximum",
        way=_metric(lambda m: m.update(train_au_percentage=[150.0 for _ in m["train_au_percentage"]])),
    ),
    Tampering(
        name="said to have failed",
        rule="utilization.stated",
        way=_metric(lambda m: m.update(train_au_meet_expectation="fail")),
    ),
    Tampering(
        name="utilization made up", rule="means.run", way=_metric(_times("train_au_mean_percentage", 1.01))
    ),
    Tampering(
        name="rate made up",
        rule="means.run",
        way=_metric(_times("train_throughput_mean_samples_per_second", 1.01)),
    ),
    Tampering(
        name="bytes made up", rule="means.run", way=_metric(_times("train_io_mean_MB_per_second", 1.01))
    ),
    Tampering(
        name="epochs gone", rule="means.epochs", way=_metric(lambda m: m.update(train_au_percentage=[]))
    ),
    Tampering(name="figure renamed", rule="utilization.minimum", way=_metric(_misspell), verdict=_UNKNOWN),
    Tampering(
        name="figures torn",
        rule="means.run",
        way=lambda tree: (tree.leaf() / "summary.json").write_text('{"metric": {'),
        verdict=_UNKNOWN,
    ),
    Tampering(name="run left out", rule="runs.number", way=lambda tree: shutil.rmtree(tree.leaf())),
    Tampering(name="run too many", rule="runs.number", way=_seventh_run),
    Tampering(name="run handed in twice", rule="runs.metadata", way=_copied_run),
    Tampering(name="long pause", rule="runs.pauses", way=_later),
    Tampering(name="few files", rule="sizing.steps", way=_summary(lambda s: s.update(num_files_train=1))),
    Tampering(
        name="large memory", rule="sizing.memory", way=_summary(lambda s: s.update(host_memory_GB=[1e9]))
    ),
    Tampering(name="another number of accelerators", rule="runs.same", way=_summary(_more_accelerators)),
    Tampering(name="another workload", rule="runs.workload", way=_overrides(_other_workload)),
    Tampering(
        name="forbidden key",
        rule="parameters.allowed",
        way=_overrides(lambda lines: lines.append("++workload.reader.batch_size=1")),
    ),
    Tampering(name="another batch", rule="parameters.configuration", way=_config(_other_batch)),
    Tampering(
        name="one file system",
        rule="paths.filesystems",
        way=lambda tree: _edit(tree.leaf() / "fs_separation.json", lambda f: f.update(same_filesystem=True)),
    ),
    Tampering(name="one place", rule="paths.set", way=_metadata(_same_paths)),
    Tampering(name="never sized", rule="dataset.sized", way=_remove("datasize")),
    Tampering(name="sized larger", rule="dataset.sized", way=_metadata(_more_sized, "datasize")),
    Tampering(name="never generated", rule="structure.phases", way=_remove("datagen")),
    Tampering(name="generated smaller", rule="dataset.generated", way=_metadata(_fewer_generated, "datagen")),
    Tampering(name="no log", rule="runs.files", way=_log_of),
    Tampering(name="no hydra", rule="runs.configuration", way=_without("dlio_config/hydra.yaml")),
    Tampering(
        name="no results",
        rule="runs.results",
        way=lambda tree: (tree.leaf().parent / "results.json").unlink(),
    ),
    Tampering(name="no pointer", rule="code.pointer", way=_without(".mlps-code-image")),
    Tampering(name="pointer elsewhere", rule="code.pointer", way=_point_elsewhere),
    Tampering(name="other program", rule="code.image", way=_change_image),
    Tampering(name="no provenance", rule="provenance.run", way=_without("provenance.json")),
    Tampering(
        name="other rules",
        rule="provenance.edition",
        way=lambda tree: _edit(tree.leaf() / "provenance.json", lambda f: f.update(rules_edition="2.0")),
    ),
    Tampering(name="not listed", rule="provenance.manifest", way=_unlist),
    Tampering(name="unknown key", rule="system.schema", way=_described(lambda d: d.update(extras="many"))),
    Tampering(name="other clients", rule="system.hosts", way=_described(_quantity)),
    Tampering(
        name="other name",
        rule="system.name",
        way=_described(lambda d: d["solution"].update(submission_name="other")),
    ),
    Tampering(
        name="no document",
        rule="structure.systems",
        way=lambda tree: tree.description().with_suffix(".pdf").unlink(),
    ),
    Tampering(
        name="folder too many", rule="structure.submitter", way=lambda tree: (tree.home() / "old").mkdir()
    ),
    Tampering(
        name="note among the runs",
        rule="structure.stray",
        way=lambda tree: (tree.leaf().parent / "notes.txt").write_text("text"),
        verdict=_WARNING,
    ),
    Tampering(
        name="samples left out", rule="order.left_out", way=_record(_fewer_in_an_epoch), verdict=_WARNING
    ),
    Tampering(name="samples read twice", rule="order.once", way=_record(_another_lot), verdict=_WARNING),
    Tampering(name="not shuffled", rule="order.shuffled", way=_record(_one_order), verdict=_WARNING),
)
