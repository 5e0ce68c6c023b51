"""Shell completion: the script of the current shell, and its installation in the user's start-up files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from click.shell_completion import ShellComplete, get_completion_class

from penstock.environment import process_environment
from penstock.errors import UsageError

if TYPE_CHECKING:
    import click

COMPLETE_VARIABLE: Final = "_PENSTOCK_COMPLETE"
_SHELLS: Final = ("bash", "zsh", "fish")


def completion_script(command: click.Command, shell: str | None = None) -> str:
    """The script that makes a shell complete `penstock`; default: the user's shell."""
    name = shell or current_shell()
    completion: type[ShellComplete] | None = get_completion_class(name)
    assert completion is not None
    return completion(command, {}, "penstock", COMPLETE_VARIABLE).source()


def install_completion(command: click.Command, shell: str | None = None, home: Path | None = None) -> str:
    """Write the script into the user's home and load it at start-up; returns what was done, in one line.

    Installed twice, it changes nothing more: the start-up file gets its line only once.
    """
    name, folder = shell or current_shell(), home or Path.home()
    if name == "fish":  # loads by itself what is in this folder
        script, start, line = folder / ".config" / "fish" / "completions" / "penstock.fish", None, ""
    else:
        script = folder / f".penstock-complete.{name}"
        start, line = folder / f".{name}rc", f". {script}\n"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(completion_script(command, name), encoding="utf-8")
    if start is not None:
        before = start.read_text(encoding="utf-8") if start.exists() else ""
        if line not in before:
            separator = "\n" if before and not before.endswith("\n") else ""
            start.write_text(f"{before}{separator}{line}", encoding="utf-8")
    return f"{name} completion is in {script}; it works in the next shell."


def current_shell() -> str:
    """The user's shell, if penstock completes in it."""
    name = Path(process_environment().get("SHELL", "")).name
    if name not in _SHELLS:
        raise UsageError(
            f"No completion for the shell {name or 'of this session'!r}",
            where="SHELL",
            fix=f"Use {', '.join(_SHELLS)}.",
        )
    return name
