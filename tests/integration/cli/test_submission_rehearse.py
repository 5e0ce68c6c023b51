"""A rehearsal as a person types it: to its verdict, killed on the way, and never taken for real."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.repeated_measurement import measure_until

from penstock.cli import main

# Read in the rank itself: starting workers would take most of the time. 48 files are two steps.
TRAINING = ("retinanet", "--scale", "0.000001", "--set", "reader.read_threads=0")
pytestmark = pytest.mark.timeout(900)

NO_LIMITS = [word for gate in ("limits", "ipc", "cluster") for word in ("--skip-gate", gate)]


def rehearse(folder: Path, *words: str) -> list[str]:
    return ["submission", "rehearse", *TRAINING, str(folder), *NO_LIMITS, *words]


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *rehearse(folder, "--json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        start_new_session=True,
    )


def status(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """Outcomes and reasons of the attempts that left no result directory."""
    capsys.readouterr()
    assert main(["submission", "status", str(folder), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    return [(attempt["outcome"], attempt["why"]) for attempt in result["attempts"]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object], list[str]]:
    """A rehearsal that was stopped three times: its folder, its document, and what was said on the way.

    Its epochs are shorter than a busy machine may keep a process waiting, which then shows in their rates.
    """
    return measure_until(
        lambda _: rehearse_killed(tmp_path_factory.mktemp("rehearsal") / "tree"),
        lambda made: str(made[1]["outcome"]).startswith("valid"),
        attempts=3,
    )


def rehearse_killed(folder: Path) -> tuple[Path, dict[str, object], list[str]]:
    said = []
    for mark, number in (
        ("datagen", signal.SIGINT),
        ("run 1 of 6", signal.SIGTERM),
        ("run 2 of 6", signal.SIGKILL),
    ):
        with start(folder) as process:
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if line.startswith(mark):
                    time.sleep(0.2)
                    # Ctrl-C goes to the whole foreground group of a terminal.
                    (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
                    break
            said += process.stderr.readlines()
    with start(folder) as process:
        out, more = process.communicate(timeout=250)
    document = json.loads(out)
    assert process.returncode == (not document["outcome"].startswith("valid")), out + more
    return folder, document, [*said, *more.splitlines(keepends=True)]


def test_killed_rehearsal_continues_and_ends_with_what_a_real_one_needs(
    killed: tuple[Path, dict[str, object], list[str]],
) -> None:
    _, document, said = killed
    assert re.fullmatch(r"valid but for size(,| and) place( and utilization)?", str(document["outcome"]))
    assert document["verdict"] == "invalid"
    needs = document["needs"]
    assert isinstance(needs, list)
    assert [need.split(":")[0] for need in needs][:5] == ["size", "time", "place", "description", "picture"]
    assert "(rehearsed: 48 files, 14.8 MiB)" in needs[0]
    assert sum("is new" in line for line in said) == 1
    assert any(line.startswith("run 6 of 6: AU ") for line in said)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("retinnet",), "Did you mean retinanet?"),
        (("llama3-8c",), "No workload is called 'llama3-8c'"),
        (("retinanet", "--accelerator", "b201"), "no retinanet for 'b201'"),
        (("retinanet", "--accelerator", "h100"), "h100 is not one of b200, mi355"),
        (("retinanet", "--set", "reader.foo=1"), "reader.foo is not a key"),
        (("retinanet", "--set", "dataset.record_length_bytes=5"), "must stay as it is"),
        (("llama3-8b", "--accelerator", "b20", "--ranks", "1"), "b20 is not one of b200, mi355"),
        (("llama3-8b", "--ranks", "1"), "1 ranks are not 8"),
        (("retinanet", "--data", "ftp://x/y"), "Unsupported storage scheme 'ftp'"),
        (("retinanet", "-O", "fsink=no"), "Did you mean 'fsync'?"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_written(
    words: tuple[str, ...], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = words
    assert main(["submission", "rehearse", name, str(tmp_path / "tree"), *options]) == 2
    assert what in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_interruptions_leave_no_traceback(killed: tuple[Path, dict[str, object], list[str]]) -> None:
    _, _, said = killed
    assert "Traceback" not in "".join(said)
    assert sum("penstock: interrupted" in line for line in said) == 2


def test_status_says_how_each_attempt_ended(
    killed: tuple[Path, dict[str, object], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = status(killed[0], capsys)
    assert ("interrupted", "Stopped by SIGTERM.") in attempts
    assert re.fullmatch(r"Process \d+ was killed, or its machine stopped.", attempts[-1][1])


def test_finished_rehearsal_is_only_checked_again(
    killed: tuple[Path, dict[str, object], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(rehearse(killed[0])) == 0
    shown = capsys.readouterr()
    assert "run 1 of 6" not in shown.err
    assert shown.out.startswith("Rehearsal of retinanet: valid but for size")


def test_check_names_a_rehearsal_and_calls_it_invalid(
    killed: tuple[Path, dict[str, object], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submission", "check", str(killed[0])]) == 1
    shown = capsys.readouterr().out
    assert "  a rehearsal: valid but for size" in shown
    assert "fail: runs.rehearsal: 8 of 8 result directories are of a rehearsal, at scale 1e-06" in shown


def test_real_results_are_not_added_to_a_rehearsal(
    killed: tuple[Path, dict[str, object], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--data", str(tmp_path), "--submission", str(killed[0]), "--system", "fast", "--closed")
    assert main(["submission", "run", "training", "retinanet_b200", *place]) == 2
    assert "This tree is a rehearsal's, which real results must not be added to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scale", "1"), "A rehearsal is smaller than the real thing"),
        (("--accelerator", "h100"), "h100 is not one of b200, mi355 (rule 2.1.11)"),
        (("--set", "train.epochs=1"), "train.epochs must stay as it is"),
    ],
)
def test_what_would_be_refused_in_earnest_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(rehearse(tmp_path / "tree", *words)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "tree" / "closed" / "rehearsal" / "results").exists()
