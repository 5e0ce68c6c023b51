"""The command lines that bring the agent to a host: started here, by ssh, or by the project's own launchers.

Place in the flow: gives `asking` its commands. Values of variables never stand in them (see `launch`).
"""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cluster.launch import LaunchRequest, find_launcher, launch_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cluster.facts.asking import CommandFor
    from penstock.environment import Environment

_SSH_VARIABLES = frozenset(
    {"HOME", "KRB5CCNAME", "LANG", "LOGNAME", "PATH", "SHELL", "SSH_AUTH_SOCK", "TMPDIR", "USER"}
)
"""What ssh itself needs. A user's settings may tell it to send on whatever else it is given: secrets, too."""


def agent(python: str) -> tuple[str, ...]:
    """The agent's own command line, under the interpreter `python` of the host that runs it.

    `-P` keeps files of the working folder from standing in for modules.
    """
    return (python, "-P", "-m", "penstock.cluster.facts")


def here(python: str) -> CommandFor:
    """The agent on this machine, whatever the host is called."""

    def command_for(_host: str) -> Sequence[str]:
        return agent(python)

    return command_for


def over_ssh(python: str, arguments: Sequence[str], *, timeout_s: float) -> CommandFor:
    """The agent through ssh, which never asks anything. `python` may be a name that the host's PATH knows."""
    fixed = ("ssh", "-T", "-o", "BatchMode=yes", *arguments, "-o", f"ConnectTimeout={math.ceil(timeout_s)}")

    def command_for(host: str) -> Sequence[str]:
        # The far shell takes one line apart; behind `--` no host's name is taken for an option.
        return (*fixed, "--", host, f"exec {shlex.join(agent(python))}")

    return command_for


def ssh_environment(environment: Environment) -> Environment:
    """The variables that ssh runs with."""
    return {name: environment[name] for name in environment if name in _SSH_VARIABLES}


def launched(request: LaunchRequest, environment: Environment, python: str) -> CommandFor:
    """The agent as a job of one rank on the host, by the launcher that `request` asks for."""
    launcher = find_launcher(request.launcher, environment)

    def command_for(host: str) -> Sequence[str]:
        # An address of IPv6 stands in brackets where a count follows.
        slot = f"[{host}]:1" if ":" in host else f"{host}:1"
        one = replace(request, hosts=slot, hostfile=None, ranks=1)
        return launch_command(one, agent(python), environment, launcher=launcher).argv

    return command_for
