"""The options that make a verb run on several ranks, and how such a verb gets its communicator.

`@ranked` adds `--ranks` and its companions to a command. Outside a launcher they start the same command line
on every rank and supervise it; inside one (mpirun, srun, torchrun) the command joins the job it is part of.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from penstock.environment import Environment, process_environment

_PANEL = "Ranks"

_Ranks = Annotated[
    int | None, typer.Option("--ranks", metavar="N", help="Run on N ranks.", rich_help_panel=_PANEL)
]
_Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="A:4,B:4", help="Hosts, with ranks on each.", rich_help_panel=_PANEL),
]
_Hostfile = Annotated[
    str | None, typer.Option("--hostfile", metavar="FILE", help="Hosts, one a line.", rich_help_panel=_PANEL)
]
_Launcher = Annotated[
    str,
    typer.Option(
        "--launcher", metavar="NAME", help="auto, mpiexec, mpirun, srun or pals.", rich_help_panel=_PANEL
    ),
]
_LauncherArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--launcher-arg", metavar="ARG", help="Passed to the launcher; repeatable.", rich_help_panel=_PANEL
    ),
]
_EnvNames = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME",
        help="A variable that remote ranks need besides AWS_* and PENSTOCK_*; repeatable.",
        rich_help_panel=_PANEL,
    ),
]


def _rank_options(
    *,
    ranks: _Ranks = None,
    hosts: _Hosts = None,
    hostfile: _Hostfile = None,
    launcher: _Launcher = "auto",
    launcher_arg: _LauncherArgs = None,
    env: _EnvNames = None,
) -> None:
    """Only its signature is used: these options are added to every ranked command."""


def ranked(command: Callable[..., None]) -> Callable[..., None]:
    """Run `command(comm, ...)` on as many ranks as its caller asks for, or joins."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    added = list(inspect.signature(_rank_options, eval_str=True).parameters.values())
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @wraps(command)
    def on_ranks(context: typer.Context, **given: Any) -> None:
        rank_words = {parameter.name: given.pop(parameter.name) for parameter in added}
        environment = process_environment()
        if _starts_others(rank_words, environment):
            _launch(rank_words, words=context.find_root().obj, environment=environment)
        else:
            _join(command, given, ranks=rank_words["ranks"], environment=environment)

    on_ranks.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads the options from it
        [*own, *added, context]
    )
    on_ranks.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *added, context]}
    return on_ranks


def _starts_others(rank_words: dict[str, Any], environment: Environment) -> bool:
    from penstock.cluster.ranked import already_ranked

    asked = rank_words["ranks"] not in (None, 1) or rank_words["hosts"] or rank_words["hostfile"]
    return bool(asked) and already_ranked(environment) is None


def _launch(rank_words: dict[str, Any], *, words: list[str], environment: Environment) -> None:
    """Start this very command line on all ranks and leave with the exit code of rank 0."""
    from penstock.cluster.launch import LaunchRequest, launcher_name, plan_launch
    from penstock.cluster.supervise import run_ranks

    request = LaunchRequest(
        ranks=rank_words["ranks"],
        hosts=rank_words["hosts"],
        hostfile=rank_words["hostfile"],
        launcher=launcher_name(rank_words["launcher"]),
        launcher_args=tuple(rank_words["launcher_arg"] or ()),
        env_names=tuple(rank_words["env"] or ()),
    )
    code = run_ranks(plan_launch(request, [sys.executable, "-m", "penstock", *words], environment))
    if code != 0:
        raise typer.Exit(code)


def _join(
    command: Callable[..., None], given: dict[str, Any], *, ranks: int | None, environment: Environment
) -> None:
    """Run the command as the rank that this process is, rank 0 of 1 if no launcher started it."""
    from penstock.cluster.join import joined_job

    with joined_job(environment, ranks=ranks) as comm:
        command(comm, **given)
