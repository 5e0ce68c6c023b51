"""Training requests: the loader and its options, the division's rules on reading."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from penstock.bench.loader import loader_options
from penstock.bench.loader.native_loader import NativeOptions
from penstock.errors import Unavailable, UsageError
from penstock.workload.load_workload import load
from penstock.workload.mlperf_divisions import SubmissionDivision, choose_reading
from penstock.workload.settings import parse_settings
from penstock.workload.shipped_catalog import families

if TYPE_CHECKING:
    from penstock.workload.spec import Workload


def _workload(*settings: str) -> Workload:
    return load("unet3d", accelerator="h100", overrides=parse_settings(settings)).workload


def test_an_unknown_loader_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"'dali'.*native, pytorch"):
        loader_options("dali", _workload(), None)


def test_threads_of_the_command_line_win_over_those_of_the_workload() -> None:
    workload = _workload("reader.read_threads=3", "reader.prefetch_size=5")
    assert loader_options("native", workload, None) == NativeOptions(threads=3, prefetch_batches=5)
    assert loader_options("native", workload, 7) == NativeOptions(threads=7, prefetch_batches=5)


@pytest.mark.parametrize(("threads", "workers"), [(None, 0), (6, 6)])
def test_the_pytorch_loader_works_as_the_reader_says(threads: int | None, workers: int) -> None:
    pytest.importorskip("torch")
    workload = _workload(
        "reader.read_threads=0", "reader.multiprocessing_context=fork", "reader.pin_memory=no"
    )
    document = loader_options("pytorch", workload, threads).document()
    assert (document["workers"], document["context"], document["pin_memory"]) == (workers, "fork", False)
    assert document["sample_bytes"] == int(workload.dataset.record_length_bytes_resize) == 2 << 20


def test_samples_that_are_not_resized_arrive_as_they_are() -> None:
    pytest.importorskip("torch")
    workload = _workload("dataset.record_length_bytes_resize=0", "dataset.record_length_bytes=3MiB")
    assert loader_options("pytorch", workload, 1).document()["sample_bytes"] == 3 << 20


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "penstock.bench.loader.pytorch_loader", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unavailable, match=r"penstock-io\[torch\]"):
        loader_options("pytorch", _workload(), None)


CLOSED = SubmissionDivision.CLOSED


def test_the_closed_division_has_torchs_loader_and_drops_remainders() -> None:
    asked = [override.path for override in parse_settings(("reader.read_threads=8",))]
    for loader, remainder in ((None, None), ("pytorch", "drop")):
        chosen = choose_reading(
            CLOSED, "unet3d_b200", asked, families=families(), loader=loader, remainder=remainder
        )
        assert chosen == ("pytorch", "drop")


@pytest.mark.parametrize(
    ("name", "settings", "loader", "remainder", "said"),
    [
        ("unet3d_b200", ["train.epochs=1"], None, None, "train.epochs must stay.*3.6.2"),
        ("own.yaml", [], None, None, "not a shipped workload"),
        ("unet3d_b200", [], "native", None, "--loader pytorch, not native"),
        ("unet3d_b200", [], None, "rotate", "--remainder drop, not rotate"),
    ],
)
def test_what_the_closed_division_forbids_is_refused_with_its_rule(
    name: str, settings: list[str], loader: str | None, remainder: str | None, said: str
) -> None:
    changed = [override.path for override in parse_settings(tuple(settings))]
    with pytest.raises(UsageError, match=said):
        choose_reading(CLOSED, name, changed, families=families(), loader=loader, remainder=remainder)


def test_without_a_word_our_own_loader_reads_and_remainders_rotate() -> None:
    chosen = choose_reading(None, "own.yaml", [], families=(), loader=None, remainder=None)
    assert chosen == ("native", "rotate")


def test_only_tensorflow_has_threads_of_their_own_for_preprocessing() -> None:
    asked = ("reader.preprocess_time=1ms", "reader.computation_threads=3")
    theirs = loader_options("native", _workload(*asked, "reader.data_loader=tensorflow"), None).document()
    ours = loader_options("native", _workload(*asked), None).document()
    assert (theirs["preprocess_threads"], ours["preprocess_threads"]) == (3, None)


def test_samples_that_are_transformed_arrive_in_their_new_shape() -> None:
    pytest.importorskip("torch")
    shape = ("reader.transformed_record_dims=[10,3]", "reader.transformed_record_element_type=float32")
    assert loader_options("pytorch", _workload(*shape), 1).document()["sample_bytes"] == 120
