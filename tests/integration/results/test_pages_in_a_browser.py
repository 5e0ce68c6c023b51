"""Every page in Chromium: wide, in the dark, on a phone and on paper, and for readers who cannot see.

What a page answers is below, as the first words of its banner: did it pass, how much, what limits it, since
when, and what to do.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.browser import Browser
from tests.support.page_checks import check_page, read_banner
from tests.support.recorded_runs import CheckpointStory, TrainingStory, record_checkpoints, record_training

from penstock.cli import main
from penstock.reports.page import write_report
from penstock.workflows.accelerator_sweep import SweepRun, find_most_accelerators, make_sweep_page


def trained(parent: Path, *, slow: bool = False) -> Path:
    story = TrainingStory(waits=lambda rank, _, step: 0.05 if slow and rank == 3 else 0.002 + step * 1e-6)
    return record_training(parent, story) / "report.html"


def checkpointed(parent: Path) -> Path:
    return record_checkpoints(parent, CheckpointStory()) / "report.html"


def compared(parent: Path) -> Path:
    runs = [str(trained(parent, slow=slow).parent) for slow in (False, True)]
    assert main(["results", "compare", *runs, "--page", str(parent / "page.html")]) == 0
    return parent / "page.html"


def probed(parent: Path) -> Path:
    assert main(["storage", "probe", "mem://x", "--size", "8MiB", "--page", str(parent / "page.html")]) == 0
    return parent / "page.html"


def swept(parent: Path) -> Path:
    def run(accelerators: int) -> SweepRun:
        return SweepRun(
            accelerators=accelerators,
            meets_threshold=accelerators <= 5,
            au_compat=min(99.0, 500.0 / accelerators),
            samples_per_s=20.0 * min(accelerators, 5),
            bottleneck="none" if accelerators <= 5 else "storage",
            results_dir=f"runs/{accelerators}",
        )

    page = make_sweep_page(*find_most_accelerators(run, most=16), "unet3d_h100", "/mnt/pfs")
    write_report(page, parent / "page.html")
    return parent / "page.html"


PAGES: dict[str, tuple[Callable[[Path], Path], dict[str, str]]] = {
    "training": (trained, {"Passed?": "passed", "How much": "AU 98.02 %"}),
    "checkpoints": (checkpointed, {"Passed?": "passed", "How much": "5 GiB of llama3-8b: written with 5.00"}),
    "comparison": (
        compared,
        {
            "Passed?": "slower",
            "How much": "unet3d_h100-",
            "Limited by": "unet3d_h100-",
            "Since": "nothing differs in what was asked",
        },
    ),
    # What limits a probe of memory depends on which of its streams was the fastest: a matter of load.
    "probe": (
        probed,
        {
            "Passed?": "measured",
            "How much": "sequentially reads at ",
            "To do": "Read with at least ",
        },
    ),
    "sweep": (
        swept,
        {
            "Passed?": "passed",
            "How much": "The storage feeds 5 accelerators",
            "Limited by": "storage",
            "Since": "6 accelerators: AU 83.3 %",
            "To do": "Look at the first run that failed: runs/6/report.html",
        },
    ),
}


@pytest.mark.parametrize(("make", "expected"), PAGES.values(), ids=PAGES)
def test_a_page_answers_first_and_can_be_read_everywhere(
    browser: Browser,
    tmp_path: Path,
    make: Callable[[Path], Path],
    expected: dict[str, str],
) -> None:
    page = make(tmp_path)
    found = read_banner(page)
    assert {question: found[question][: len(text)] for question, text in expected.items()} == expected
    assert all(found[asked] for asked in ("Passed?", "How much", "Limited by", "Since", "To do"))
    check_page(browser, page)
