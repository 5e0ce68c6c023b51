"""Shell completion: the scripts of three shells, and the names that are completed."""

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from penstock.cli import main
from penstock.cli.app import app, completion_script
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("/bin/bash", "complete -o nosort"),
        ("/usr/bin/zsh", "#compdef penstock"),
        ("/usr/bin/fish", "complete --"),
    ],
)
def test_each_shell_has_a_script(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", shell)
    assert main(["--show-completion"]) == 0
    script = capsys.readouterr().out
    assert line in script
    assert "_PENSTOCK_COMPLETE" in script


@pytest.mark.parametrize("shell", ["/bin/tcsh", ""])
def test_an_unknown_shell_is_refused(monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("SHELL", shell)
    with pytest.raises(UsageError, match="Use bash, zsh or fish"):
        completion_script(app)


@pytest.mark.parametrize(
    ("words", "start", "expected"),
    [
        (["training", "run"], "unet", {"unet3d", "unet3d_h100"}),
        (["checkpoint", "size"], "llama3-", {"llama3-8b", "llama3-70b"}),
        (["submission", "rules"], "sizing.", {"sizing.memory", "sizing.steps"}),
        (["results", "show"], "unet", {"unet3d-1"}),
        (["results", "show", "--results", "elsewhere"], "", {"bert-1"}),
        (["docs"], "tr", {"trace", "training"}),
    ],
)
def test_names_are_completed(
    words: list[str], start: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("runs/unet3d-1", "elsewhere/bert-1"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run.json").touch()
    monkeypatch.chdir(tmp_path)
    shell = ShellComplete(app, {}, "penstock", "_PENSTOCK_COMPLETE")
    found = {item.value for item in shell.get_completions(words, start)}
    assert expected <= found
    assert all(name.startswith(start) for name in found)
