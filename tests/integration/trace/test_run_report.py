"""`penstock trace report`: the page in a browser and its data, of one run, several, and next to nothing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser import Browser
from tests.support.page_checks import check_page, read_banner
from tests.support.trace_files import Writing, lines_of, make_events, write_trace

from penstock.cli import main
from penstock.environment import process_environment

FIGURES = [
    "timeline", "rank_bytes", "rank_busy", "bandwidth", "overlap", "sizes", "latencies", "offsets", "files",
    "metadata", "operations",
]  # fmt: skip
STRACE = """\
41 1700000000.000000 openat(AT_FDCWD, "/data/a", O_RDWR) = 3 <0.000100>
41 1700000000.010000 pread64(3, ""..., 4096, 0) = 4096 <0.002000>
41 1700000000.020000 pread64(3, ""..., 4096, 8192) = 4096 <0.003000>
42 1700000000.030000 pwrite64(3, ""..., 100, 4096) = 100 <0.001000>
41 1700000000.040000 close(3) = 0 <0.000010>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of four ranks, the second with another seed, and the listing of a small program."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("base", "new")):
        (folder / name).mkdir()
        for rank in range(4):
            write_trace(folder / name, Writing(events=800, rank=rank, seed=seed))
    (folder / "program.strace").write_text(STRACE)
    return folder


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["trace", "report", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_json_has_the_data_of_every_figure_and_the_sums_of_the_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = report(capsys, str(folder / "base"), str(folder / "new"))
    assert made["page"] is None
    assert made["runs"] == ["base", "new"]
    assert list(made["figures"]) == FIGURES
    for seed, run in enumerate(("base", "new")):
        events = [
            event for rank in range(4) for event in make_events(Writing(events=800, rank=rank, seed=seed))
        ]
        moved = sum(event.size_bytes or 0 for event in events)
        (row,) = [row for row in made["overview"]["rows"] if row["run"] == run]
        assert row["read_bytes"] + row["written_bytes"] == moved
        assert row["num_calls"] == sum(event.cat == "POSIX" for event in events)
        for name in ("rank_bytes", "bandwidth"):
            rows = [row for row in made["figures"][name]["rows"] if row["run"] == run]
            assert sum(row["read_bytes"] + row["written_bytes"] for row in rows) == pytest.approx(moved)
        busy = [row for row in made["figures"]["rank_busy"]["rows"] if row["run"] == run]
        # A process of these traces calls one after the other.
        assert sum(row["busy_us"] for row in busy) == sum(e.dur_us for e in events if e.cat == "POSIX")
        assert not {"read_bytes", "written_bytes"} & set(busy[0]), "they are in rank_bytes"
        bins = [row for row in made["figures"]["sizes"]["rows"] if row["run"] == run]
        assert sum(row["total_bytes"] for row in bins) == moved
    assert not (Path.cwd() / "report.html").exists()


def test_the_page_begins_with_the_answer_and_lists_its_contents(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "deep" / "page.html"
    assert main(["trace", "report", str(folder / "base"), "-o", str(page)]) == 0
    said = capsys.readouterr()
    text = page.read_text(encoding="utf-8")
    assert f"wrote {page}" in said.err
    first = said.out.splitlines()[0]
    assert first.startswith("In ")
    assert text.index(first) < text.index("<nav") < text.index('id="findings"') < text.index('id="timeline"')
    for name in ["findings", *FIGURES]:
        assert f'href="#{name}"' in text
        assert f'id="{name}"' in text
    assert "<script" not in text
    assert 'src="http' not in text
    assert len(text) < 1_000_000


def test_without_out_the_page_is_report_html_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "report", str(folder / "program.strace")]) == 0
    assert "program" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_files_of_one_folder_are_one_run_and_an_own_name_is_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(map(str, (folder / "base").iterdir()))
    made = report(capsys, *files, f"other={folder / 'new'}")
    assert made["runs"] == ["base", "other"]
    assert made["overview"]["rows"][0]["num_ranks"] == 4


def test_tiers_and_phases_of_the_command_line_are_in_the_figures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = report(
        capsys,
        str(folder / "base"),
        "--tier",
        "pfs=/p/lustre2",
        "--phase",
        "io=name~compute",
        "--where",
        "tid > 0",
    )
    assert {row["tier"] for row in made["figures"]["bandwidth"]["rows"]} == {"pfs"}
    assert made["figures"]["overlap"]["rows"] == []
    assert "a rule of --phase" in made["figures"]["overlap"]["why_empty"]


def test_lost_lines_are_on_the_page_and_an_error_with_strict(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.pfw"
    torn.write_text("".join(lines_of(Writing(events=50))) + "no event at all\n")
    page = tmp_path / "page.html"
    assert main(["trace", "report", str(torn), "-o", str(page)]) == 0
    assert "1 of" in capsys.readouterr().err
    assert "no event at all" in page.read_text(encoding="utf-8")
    page.unlink()
    assert main(["trace", "report", str(torn), "-o", str(page), "--strict"]) == 1
    assert not page.exists()


def test_names_from_traces_cannot_become_markup(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.strace", tmp_path / "page.html"
    trace.write_text(STRACE.replace("/data/a", "/data/<script>alert(1)</script>"))
    assert main(["trace", "report", f"{trace}", "-o", str(page)]) == 0
    assert "<script" not in page.read_text(encoding="utf-8")


def test_no_trace_there_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "report", "nowhere.pfw"]) == 2
    assert "nowhere.pfw" in capsys.readouterr().err


QUESTIONS = {
    # A phone widens its screen to what does not fit, so it is measured against the width that was asked for.
    "width": "Math.max(document.documentElement.scrollWidth, window.innerWidth)",
    "panels": "document.querySelectorAll('figure.panel').length",
    "empty": "[...document.querySelectorAll('figure.panel')].filter(panel => "
    "![...panel.querySelectorAll('path')].some(path => path.getBBox().width > 0))"
    ".map(panel => panel.textContent).join()",
    "blank": "[...document.querySelectorAll('h2')].filter(h => !h.nextElementSibling || "
    "h.nextElementSibling.tagName === 'H2').map(h => h.textContent).join()",
    "outside": "[...document.querySelectorAll('figure.panel svg')].filter(s => "
    "s.getBoundingClientRect().right > document.documentElement.clientWidth).length",
    "cut": "[...document.querySelectorAll('.y span')].filter(s => s.scrollWidth > s.clientWidth + 1)"
    ".map(s => s.textContent).join()",
    "paper": "getComputedStyle(document.body).backgroundColor",
    "hues": "JSON.stringify([...document.querySelectorAll('figure.panel')].map(p => "
    "[p.querySelector('figcaption').textContent.trim().split(/[:, \\n]/)[0], "
    "getComputedStyle(p.querySelector('.swatch')).backgroundColor]))",
    "requests": "performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length",
}
SCREENS = [
    pytest.param(1400, False, "rgb(251, 251, 249)", id="wide, light"),
    pytest.param(1400, True, "rgb(20, 24, 29)", id="wide, dark"),
    pytest.param(390, False, "rgb(251, 251, 249)", id="phone, light"),
]


def look_at(browser: Browser, page: Path, *, width: int, dark: bool, paper: str) -> dict[str, Any]:
    """Open the page, and check what holds for every page of a report."""
    seen = browser.open(page, width=width, dark=dark, questions=QUESTIONS)
    page.with_suffix(f".{width}.png").write_bytes(seen.screenshot)
    assert seen.errors == []
    assert seen.answers["width"] <= width
    assert (seen.answers["empty"], seen.answers["blank"], seen.answers["cut"]) == ("", "", "")
    assert seen.answers["outside"] == 0
    assert (seen.answers["paper"], seen.answers["requests"]) == (paper, 0)
    return seen.answers


@pytest.mark.parametrize(("width", "dark", "paper"), SCREENS)
def test_a_report_of_two_runs_fits_its_screen_and_each_run_keeps_its_colour(
    browser: Browser, folder: Path, tmp_path: Path, *, width: int, dark: bool, paper: str
) -> None:
    page = tmp_path / "page.html"
    assert main(["trace", "report", str(folder / "base"), str(folder / "new"), "-o", str(page)]) == 0
    seen = look_at(browser, page, width=width, dark=dark, paper=paper)
    hues = {tuple(pair) for pair in json.loads(seen["hues"])}
    assert seen["panels"] >= 16
    assert {name for name, _ in hues} == {"base", "new"}
    assert len(hues) == 2
    assert len({hue for _, hue in hues}) == 2


def test_a_report_can_be_read_by_all_and_on_paper(browser: Browser, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["trace", "report", str(folder / "base"), "-o", str(page)]) == 0
    check_page(browser, page)


def test_the_first_screen_answers_what_was_moved_what_costs_most_when_and_what_to_do(
    folder: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert main(["trace", "report", str(folder / "program.strace"), "-o", str(page)]) == 0
    assert read_banner(page) == {
        "Passed?": "could be faster",
        "How much": ("In 40.0 ms, program read 8 KiB and wrote 100 B, with 5 calls on 1 file (2 processes)."),
        "Limited by": "program: more work on some ranks, process 41, which costs 2.05 ms a rank",
        "Since": "most was moved 10.0 ms after the start, at 1.95 MiB/s",
        "To do": 'Look at the finding "program: more work on some ranks, process 41".',
        "Troubles": "",
    }


@pytest.mark.parametrize(("width", "dark", "paper"), SCREENS)
def test_a_small_listing_has_panels_only_where_there_is_something_to_draw(
    browser: Browser, folder: Path, tmp_path: Path, *, width: int, dark: bool, paper: str
) -> None:
    page = tmp_path / "page.html"
    assert main(["trace", "report", str(folder / "program.strace"), "-o", str(page)]) == 0
    seen = look_at(browser, page, width=width, dark=dark, paper=paper)
    assert 7 <= seen["panels"] <= 12
    assert "is computation" in page.read_text(encoding="utf-8")


def test_a_trace_without_io_has_no_panel_at_all(browser: Browser, tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.pfw", tmp_path / "page.html"
    trace.write_text('[\n{"name":"start","cat":"app","pid":1,"tid":1,"ts":5,"dur":2,"ph":"X","args":{}}\n]\n')
    assert main(["trace", "report", str(trace), "-o", str(page)]) == 0
    seen = look_at(browser, page, width=390, dark=False, paper="rgb(251, 251, 249)")
    assert seen["panels"] == 0


def fixtures() -> Path:
    """Real traces, which are kept beside the project; a skip where there are none."""
    folder = process_environment().get("PENSTOCK_TRACE_FIXTURES", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("no real traces here: PENSTOCK_TRACE_FIXTURES")
    return Path(folder)


def test_a_real_training_read_109_gib_over_eight_ranks(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = tmp_path / "unet3d"
    shutil.copytree(fixtures() / "dftracer-dlio-unet3d", traces)
    page = tmp_path / "page.html"
    made = report(capsys, str(traces), "-o", str(page))
    (row,) = made["overview"]["rows"]
    assert (row["read_bytes"], row["written_bytes"], row["num_ranks"]) == (117_265_568_800, 11_420, 8)
    assert re.match(r"In 56\.7 s, unet3d read 109 GiB and wrote 11\.2 KiB", made["says"][0])
    assert look_at(browser, page, width=390, dark=True, paper="rgb(20, 24, 29)")["panels"] == 14
