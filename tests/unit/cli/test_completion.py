"""Shell completion: scripts for three shells, and their installation in a home directory."""

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from penstock.cli import main
from penstock.cli.app import app, completion_script, install_completion
from penstock.errors import UsageError


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    assert "_PENSTOCK_COMPLETE" in completion_script(app, shell)


@pytest.mark.parametrize(("shell", "start"), [("bash", ".bashrc"), ("zsh", ".zshrc")])
def test_installed_twice_it_is_loaded_once(tmp_path: Path, shell: str, start: str) -> None:
    (tmp_path / start).write_text("alias ll='ls -l'")
    for _ in range(2):
        assert shell in install_completion(app, shell, tmp_path)
    first, second = (tmp_path / start).read_text().splitlines()
    assert first == "alias ll='ls -l'"
    assert second == f". {tmp_path}/.penstock-complete.{shell}"
    assert "_PENSTOCK_COMPLETE" in (tmp_path / f".penstock-complete.{shell}").read_text()


def test_a_start_up_file_is_made_where_there_is_none(tmp_path: Path) -> None:
    install_completion(app, "bash", tmp_path)
    assert (tmp_path / ".bashrc").read_text() == f". {tmp_path}/.penstock-complete.bash\n"


def test_fish_finds_the_script_by_its_folder(tmp_path: Path) -> None:
    install_completion(app, "fish", tmp_path)
    assert (tmp_path / ".config/fish/completions/penstock.fish").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [".config"]


def test_the_shell_is_the_users(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert main(["--show-completion"]) == 0
    assert "#compdef penstock" in capsys.readouterr().out


def test_the_command_installs_for_the_users_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--install-completion"]) == 0
    assert "works in the next shell" in capsys.readouterr().out
    assert (tmp_path / ".penstock-complete.bash").is_file()


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
