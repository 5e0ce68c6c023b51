"""Trees with a hostile file: the file is named as not checked, in seconds and within a small memory."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.measured_process import run_measured
from tests.support.submission.hostile_trees import HOSTILE, HostileTree
from tests.support.submission.numbered_tree import RESULT, valid_submission

from penstock.errors import printable
from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.find_results import search_tree
from penstock.submission.rules import rule_by_id

MAX_SECONDS = 5
MAX_MIB = 300


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if number % 3 else [])
        for number, each in enumerate(HOSTILE)
    ],
)
def test_hostile_file_is_named_in_bounded_time_and_memory(hostile: HostileTree, tmp_path: Path) -> None:
    tree = hostile.write(tmp_path / "tree")
    command = [sys.executable, "-m", "penstock", "submission", "check", str(tree), "--json"]
    used = run_measured(["timeout", "60", *command], tmp_path / "output")
    assert used.returncode in (1, 3)
    (result,) = json.loads((tmp_path / "output").read_text())["results"]
    file = hostile.path(tree).relative_to(tree).as_posix()
    told = [
        finding
        for finding in result["findings"]
        if finding["evidence"].startswith(file) and hostile.says in finding["proof"]
    ]
    assert {finding["verdict"] for finding in told} == {"not checked"}
    assert not any("the rule itself failed" in finding["proof"] for finding in result["findings"])
    # The time of a loaded machine is not the checker's.
    assert min(used.took_s, used.cpu_s) < MAX_SECONDS
    assert used.mib < MAX_MIB


def test_there_are_hostile_trees_enough() -> None:
    assert len({hostile.name for hostile in HOSTILE}) == len(HOSTILE) >= 20


def test_names_of_files_do_not_act_on_the_terminal(tmp_path: Path) -> None:
    tree = valid_submission()
    tree.files = {path.replace("/unet3d", "/un\x1b[2J\net\u202e3d"): v for path, v in tree.files.items()}
    root = tree.write(tmp_path)
    (root / "closed/acme/systems/fast.json").unlink()
    command = [sys.executable, "-m", "penstock", "submission", "check", str(root)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert "results/fast/un\\x1b[2J\\net\\u202e3d\n" in shown
    assert "\x1b[2J" not in shown


def test_names_that_are_no_text_are_checked_and_written_to_every_report(tmp_path: Path) -> None:
    root = valid_submission().write(tmp_path / "tree")
    folder = root / "closed/acme" / RESULT
    folder.rename(f"{folder}\udcff")
    reports = [tmp_path / name for name in ("a.csv", "a.html")]
    options = [word for path in reports for word in (f"--{path.suffix[1:]}", str(path))]
    command = [sys.executable, "-m", "penstock", "submission", "check", str(root), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for path in reports:
        assert "unet3d\\udcff" in path.read_text(encoding="utf-8"), path


def test_names_of_files_do_not_act_from_any_report(tmp_path: Path) -> None:
    tree = valid_submission()
    tree.files = {path.replace("/unet3d", "/un\x1b[2J3d"): v for path, v in tree.files.items()}
    root = tree.write(tmp_path / "tree")
    (root / "closed/acme/systems/fast.json").unlink()
    made = tmp_path / "made"
    made.mkdir()
    options = [f"--{kind}={made / kind}" for kind in ("csv", "html")]
    for words in (["check", str(root), *options], ["report", str(root), "-o", str(made / "report")]):
        command = [sys.executable, "-m", "penstock", "submission", *words]
        assert subprocess.run(command, capture_output=True, check=False).returncode in (0, 1)
    files = [path for path in made.rglob("*") if path.is_file()]
    assert len(files) == 8
    assert [path for path in files if "\x1b" in str(path) or b"\x1b" in path.read_bytes()] == []
    assert all(b"un\\x1b[2J3d" in (made / name).read_bytes() for name in ("csv", "html"))


def test_text_that_prints_is_left_alone() -> None:
    assert printable("plain ± text\n") == "plain ± text\n"
    assert printable("two\nlines", keep="") == "two\\nlines"


def test_description_of_a_limit_takes_no_time_to_search(tmp_path: Path) -> None:
    tree = valid_submission()
    tree.files["systems/fast.json"] = {"notes": "1G " * 300_000}
    for summary in tree.summaries():
        summary["host_memory_GB"] = [999_999]
    begin = time.process_time()
    (result,) = check(tree.write(tmp_path), load_edition("v1.0"), rules=[rule_by_id("sizing.memory")])
    assert result.verdict.value == "invalid"
    assert time.process_time() - begin < MAX_SECONDS


def test_results_that_are_a_link_are_named_and_do_not_stop_others(tmp_path: Path) -> None:
    root = valid_submission().write(tmp_path)
    other = root / "closed/other"
    other.mkdir()
    (other / "results").symlink_to("/")
    assert [result.organisation for result in check(root, load_edition("v1.0"))] == ["acme"]
    (reason,) = search_tree(root).unreadable
    assert f"This is a link, and links are not searched ({other}/results)" in reason
