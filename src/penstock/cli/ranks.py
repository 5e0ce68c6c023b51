"""The options that make a verb run on several ranks, and how such a verb gets its communicator.

`@ranked` adds `--ranks` and its companions to a command. Outside a launcher they start the same command line
on every rank and supervise it; inside one (mpirun, srun, torchrun) the command joins the job it is part of.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import values
from penstock.cli.terminal import progress_columns
from penstock.cli.tracing import traced
from penstock.environment import PROGRESS_COLUMNS, TRACE, Environment, process_environment

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
_Trace = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="DIR", help="Trace every access to storage into DIR.", rich_help_panel=_PANEL
    ),
]
_Timeout = Annotated[
    str,
    typer.Option("--timeout", metavar="TIME", help="Longest wait for other ranks.", rich_help_panel=_PANEL),
]


def _rank_options(
    *,
    ranks: _Ranks = None,
    hosts: _Hosts = None,
    hostfile: _Hostfile = None,
    launcher: _Launcher = "auto",
    launcher_arg: _LauncherArgs = None,
    env: _EnvNames = None,
    timeout: _Timeout = "5min",
    trace: _Trace = None,
) -> None:
    """Only its signature is used: these options are added to every ranked command."""


def ranked(command: Callable[..., int | None]) -> Callable[..., None]:
    """Run `command(comm, ...)` on as many ranks as its caller asks for, or joins; one where neither says.

    What the command returns is its exit code: a verdict, given by all ranks together. Errors are raised.
    """
    return ranked_on(None)(command)


def ranked_on(
    unsaid_ranks: int | None,
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """The same for a command that makes sense on several ranks only: so many where nobody says."""
    return partial(_on_ranks, unsaid_ranks=unsaid_ranks)


def _on_ranks(command: Callable[..., int | None], *, unsaid_ranks: int | None) -> Callable[..., None]:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    added = list(inspect.signature(_rank_options, eval_str=True).parameters.values())
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @wraps(command)
    def on_ranks(context: typer.Context, **given: Any) -> None:
        asked = _Asked(**{parameter.name: given.pop(parameter.name) for parameter in added})
        environment = process_environment()
        asked = asked.or_ranks(unsaid_ranks, environment)
        code = (
            _launch(asked, words=context.find_root().obj, environment=environment)
            if asked.starts_others(environment)
            else _join(command, given, asked=asked, environment=environment)
        )
        if code:
            raise typer.Exit(code)

    parameters = [*own, *added, context]
    on_ranks.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    on_ranks.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return on_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The values of the options above."""

    ranks: int | None
    hosts: str | None
    hostfile: str | None
    launcher: str
    launcher_arg: list[str] | None
    env: list[str] | None
    timeout: str
    trace: str | None

    def or_ranks(self, unsaid_ranks: int | None, environment: Environment) -> _Asked:
        """With so many ranks, where neither the caller nor a launcher says how many."""
        from penstock.cluster.launcher_env import detect_rank

        is_said = self.ranks is not None or self.hosts or self.hostfile
        if unsaid_ranks is None or is_said or detect_rank(environment) is not None:
            return self
        return replace(self, ranks=unsaid_ranks)

    def starts_others(self, environment: Environment) -> bool:
        """Whether this process is to launch ranks, rather than to be one."""
        from penstock.cluster.launcher_env import detect_rank

        several = self.ranks not in (None, 1) or self.hosts or self.hostfile
        return bool(several) and detect_rank(environment) is None


def _launch(asked: _Asked, *, words: list[str], environment: Environment) -> int:
    """Start this very command line on all ranks; the exit code is rank 0's."""
    from penstock.cluster.launcher_command import LaunchRequest, parse_launcher_name, plan_launch
    from penstock.cluster.supervision.job_launch import launch_job

    request = LaunchRequest(
        ranks=asked.ranks,
        hosts=asked.hosts,
        hostfile=asked.hostfile,
        launcher=parse_launcher_name(asked.launcher),
        launcher_args=tuple(asked.launcher_arg or ()),
        env_names=tuple(asked.env or ()),
    )
    columns = progress_columns()
    told = dict(environment) if columns is None else {**environment, PROGRESS_COLUMNS: columns}
    if asked.trace is not None:
        told[TRACE] = str(Path(asked.trace).absolute())
    return launch_job(plan_launch(request, [sys.executable, "-m", "penstock", *words], told))


def _join(
    command: Callable[..., int | None], given: dict[str, Any], *, asked: _Asked, environment: Environment
) -> int | None:
    """Run the command as the rank that this process is, rank 0 of 1 if no launcher started it."""
    from penstock.cluster.supervision.rank_process import join_job

    timeout_s = values.seconds("--timeout", asked.timeout)
    job = join_job(environment, ranks=asked.ranks, timeout_s=timeout_s)
    with job as comm, traced(asked.trace or environment.get(TRACE), comm):
        return command(comm, **given)
