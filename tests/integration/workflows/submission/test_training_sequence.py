"""A whole training result of our own: judged by our rules; how making it goes on after a break."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from tests.integration.workflows.submission.small_result import SCALE, SmallResult
from tests.support.rank_threads import on_ranks

from penstock.errors import PenstockError, StorageError, UsageError
from penstock.progress import Progress
from penstock.submission.authoring.run_sequence import read_series_state
from penstock.submission.check import check
from penstock.submission.edition import Edition, load_edition
from penstock.submission.rules.rule import Validity, Verdict
from penstock.submission.tree_layout import MANIFEST, SubmissionPhase

SCALE_BREAKS = {"sizing.steps", "parameters.allowed", "parameters.configuration"}


def scaled_edition() -> Edition:
    """v3.0 as it would be for so small a workload: what scale changes is free, and four steps are enough."""
    edition = load_edition("v3.0-strict")
    scaled = {text.partition("=")[0] for text in SCALE}
    changed = {key.replace("_bytes", "") for key in scaled}
    parameters = edition.parameters.model_copy(
        update={
            "closed": edition.parameters.closed | scaled | changed,
            "compared": tuple(key for key in edition.parameters.compared if key not in changed),
        }
    )
    return edition.model_copy(
        update={
            "parameters": parameters,
            "sizing": edition.sizing.model_copy(update={"min_steps": 4}),
            # How busy emulated accelerators are is this machine's affair; that it is judged is not.
            "min_utilization_percent": {"unet3d": 10.5},
        }
    )


def findings(root: Path, edition: Edition) -> list[tuple[str, Verdict, str]]:
    (judged,) = check(root, edition)
    bad = {Verdict.FAIL, Verdict.NOT_CHECKED}
    return [(each.rule, each.verdict, each.proof) for each in judged.findings if each.verdict in bad]


def one_file_system(made: SmallResult) -> set[str]:
    """The rule that this machine cannot keep, where everything is on one file system."""
    is_one = made.root.stat().st_dev == made.data.stat().st_dev
    return {"paths.filesystems"} if is_one else set()


def test_a_tree_of_our_own_runs_is_valid_but_for_its_scale(made: SmallResult) -> None:
    found = findings(made.root, load_edition("v3.0"))
    of_machine = one_file_system(made) | {"utilization.minimum"}
    assert {rule for rule, _, _ in found} - of_machine == SCALE_BREAKS, found
    assert {verdict for _, verdict, _ in found} == {Verdict.FAIL}


def test_a_tree_of_our_own_runs_is_valid_by_rules_of_its_scale(made: SmallResult) -> None:
    (judged,) = check(made.root, scaled_edition())
    found = findings(made.root, scaled_edition())
    assert {rule for rule, _, _ in found} == one_file_system(made), found
    assert judged.verdict is (Validity.INVALID if one_file_system(made) else Validity.VALID)
    assert judged.metrics["train_throughput_mean_samples_per_second"] > 0


def test_the_manifest_lists_all_leaves(made: SmallResult) -> None:
    home = made.root / "closed" / "acme"
    manifest = yaml.safe_load((home / MANIFEST).read_text())
    leaves = {str(path.parent.relative_to(home)) for path in home.glob("results/**/*_metadata.json")}
    assert {run["leaf"] for run in manifest["runs"]} == leaves
    assert len(leaves) == 8
    assert {run["core_config"] for run in manifest["runs"] if run["command"] == "run"} != {"unknown"}


def test_a_whole_result_is_left_as_it_is(made: SmallResult) -> None:
    before = read_series_state(made.session.series)
    sequence, said = made.whole()
    assert not sequence.phases
    assert said == []
    assert read_series_state(made.session.series) == before


@pytest.fixture
def begun(tmp_path: Path) -> SmallResult:
    """A result of which two runs are there."""
    small = SmallResult(root=tmp_path / "tree", data=tmp_path / "data")
    small.datasize()
    small.datagen()
    list(small.runs(2))
    return small


def test_an_interrupted_result_goes_on_where_it_was(begun: SmallResult) -> None:
    before = [published_dir.folder for published_dir in read_series_state(begun.session.series).runs]
    _, said = begun.whole()
    assert [text for text in said if ":" not in text] == [f"run {number} of 6" for number in (3, 4, 5, 6)]
    state = read_series_state(begun.session.series)
    assert [published_dir.folder for published_dir in state.runs][:2] == before
    assert (len(state.datasizes), len(state.datagens)) == (1, 1)


def test_runs_that_nothing_may_follow_any_more_are_set_aside_not_deleted(begun: SmallResult) -> None:
    before = [published_dir.folder.name for published_dir in read_series_state(begun.session.series).runs]
    begun.clock.now += timedelta(hours=1)
    _, said = begun.whole()
    assert [text.split(" was set aside")[0] for text in said[:2]] == before
    after = [published_dir.folder.name for published_dir in read_series_state(begun.session.series).runs]
    assert len(after) == 6
    assert not set(after) & set(before)
    counted = {path.parent.name for path in (begun.root / ".mlps/trash").glob("**/summary.json")}
    assert counted == set(before)


def test_another_result_in_the_same_place_is_refused(begun: SmallResult) -> None:
    begun.data = begun.data.with_name("elsewhere")
    other = SmallResult(root=begun.root, data=begun.data)
    with pytest.raises(UsageError, match="Another result is under way here: its data"):
        other.whole()


def test_parts_are_made_one_by_one_and_none_twice(tmp_path: Path) -> None:
    small = SmallResult(root=tmp_path / "tree", data=tmp_path / "data")
    sequence, said = small.part(SubmissionPhase.DATAGEN)
    assert said == ["datagen: 28 files, 112 KiB"]
    assert sequence.phases == (SubmissionPhase.DATASIZE, *[SubmissionPhase.RUN] * 6)
    sequence, said = small.part(SubmissionPhase.RUN)
    assert said[0] == "datasize: 28 files, 112 KiB"
    assert said[1] == "run 1 of 6, the warm-up"
    assert sequence.phases == (SubmissionPhase.RUN,) * 5
    _, said = small.part(SubmissionPhase.DATAGEN)
    assert said == ["datagen: exists already"]


def test_run_below_the_minimum_ends_the_sequence_and_is_not_published(begun: SmallResult) -> None:
    metric = replace(begun.workload.metric, au=1.01)
    begun.workload = replace(begun.workload, metric=metric)
    with pytest.raises(StorageError, match=r"run 3 of 6 does not count.* < 101 %, unet3d's minimum"):
        begun.whole()
    state = read_series_state(begun.session.series)
    assert len(state.runs) == 2
    (attempt,) = state.attempts
    assert (attempt.outcome, "unet3d's minimum" in attempt.why) == ("failed", True)


def test_warm_up_may_be_below_the_minimum(tmp_path: Path) -> None:
    small = SmallResult(root=tmp_path / "tree", data=tmp_path / "data")
    small.workload = replace(small.workload, metric=replace(small.workload.metric, au=1.01))
    with pytest.raises(StorageError, match="run 2 of 6 does not count"):
        small.whole()
    assert len(read_series_state(small.session.series).runs) == 1


def test_failed_datagen_says_why_and_leaves_nothing_that_blocks(tmp_path: Path) -> None:
    small = SmallResult(root=tmp_path / "tree", data=tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").touch()
    with pytest.raises(PenstockError):
        small.whole()
    (attempt,) = read_series_state(small.session.series).attempts
    assert attempt.outcome == "failed"
    assert str(tmp_path / "data") in attempt.why
    elsewhere = SmallResult(root=small.root, data=tmp_path / "elsewhere")
    _, said = elsewhere.part(SubmissionPhase.DATAGEN)
    assert "was set aside: nothing was generated or run for this size" in said[0]


class StoppedIn(Progress):
    """Somebody presses Ctrl-C when this phase begins."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def begin(self, phase: str, total: float) -> None:
        if phase.startswith(self.phase):
            raise KeyboardInterrupt


def test_ctrl_c_leaves_the_tree_as_it_was_and_the_same_command_goes_on(begun: SmallResult) -> None:
    before = read_series_state(begun.session.series).runs
    usual, begun.clock.run = begun.clock.run, timedelta(seconds=9)
    with pytest.raises(KeyboardInterrupt):
        begun.whole(StoppedIn("epoch 2"))
    begun.clock.run = usual
    state = read_series_state(begun.session.series)
    assert state.runs == before
    assert [attempt.outcome for attempt in state.attempts] == ["interrupted"]
    _, said = begun.whole()
    assert [text for text in said if ":" not in text] == [f"run {number} of 6" for number in (3, 4, 5, 6)]


def test_several_ranks_make_one_result_and_see_it_alike(tmp_path: Path) -> None:
    small = SmallResult(root=tmp_path / "tree", data=tmp_path / "data")
    small.clock.run = timedelta(seconds=30)  # each of the two ranks tells of its host
    outcomes = on_ranks(2, lambda comm: small.whole(comm=comm), hosts=["here"] * 2, timeout_s=250)
    counted = [[published_dir.folder for published_dir in sequence.counted] for sequence, _ in outcomes]
    assert counted[0] == counted[1]
    runs = read_series_state(small.session.series).runs
    assert [published_dir.folder for published_dir in runs] == counted[0]
    assert {published_dir.num_processes for published_dir in runs} == {2}
    assert len(list(runs[0].folder.glob("*_output.json"))) == 2
