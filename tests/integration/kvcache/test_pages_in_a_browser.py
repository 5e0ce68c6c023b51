"""Pages of key-value caches in Chromium: of a trace, of a run, and of several storages."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.browser import Browser
from tests.support.page_checks import check_page, read_banner

from penstock.cli import main


def traced(parent: Path) -> str:
    """Requests of which each comes again after some others."""
    turns = ((turn * 7 % 23, 100 * turn) for turn in range(200))
    lines = [
        {"timestamp": at, "input_length": 1024, "output_length": 5, "hash_ids": [number, 99 + number]}
        for number, at in turns
    ]
    path = parent / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def simulated(parent: Path) -> Path:
    page = parent / "page.html"
    assert main(["kvcache", "simulate", traced(parent), "--blocks", "10,30,50", "--page", str(page)]) == 0
    return page


def replayed(parent: Path) -> Path:
    page = parent / "page.html"
    folders = ["--to", str(parent / "kv"), "--results", str(parent / "results"), "--page", str(page)]
    tiers = ["--gpu", "640MiB", "--cpu", "2GiB", "--scale", "1/1000"]
    assert main(["kvcache", "replay", traced(parent), *folders, *tiers]) == 0
    return page


def compared(parent: Path) -> Path:
    page = parent / "compared.html"
    for name in ("one", "other"):
        (parent / name).mkdir()
        replayed(parent / name)
    runs = [str(folder) for folder in parent.glob("*/results/kvcache-*")]
    assert main(["kvcache", "compare", *runs, "--page", str(page)]) == 0
    return page


PAGES: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "simulation": (simulated, "simulated", "of all blocks hit"),
    "run": (replayed, "whole", "of payload"),
    "comparison": (compared, "comparable", "is best"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_every_screen_and_begins_with_the_answer(
    name: str, browser: Browser, tmp_path: Path
) -> None:
    make, verdict, figure = PAGES[name]
    page = make(tmp_path)
    check_page(browser, page)
    answers = read_banner(page)
    assert answers["Passed?"] == verdict
    assert figure in answers["How much"]
    assert answers["To do"]
