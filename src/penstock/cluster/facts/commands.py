"""The command lines that bring the agent to a host: started here, or by the project's own launchers.

Place in the flow: gives `asking` its commands. Values of variables never stand in them (see `launch`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cluster.launch import LaunchRequest, find_launcher, launch_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cluster.facts.asking import CommandFor
    from penstock.environment import Environment


def agent(python: str) -> tuple[str, ...]:
    """The agent's own command line, under the interpreter `python` of the host that runs it."""
    return (python, "-m", "penstock.cluster.facts")


def here(python: str) -> CommandFor:
    """The agent on this machine, whatever the host is called."""

    def command_for(_host: str) -> Sequence[str]:
        return agent(python)

    return command_for


def launched(request: LaunchRequest, environment: Environment, python: str) -> CommandFor:
    """The agent as a job of one rank on the host, by the launcher that `request` asks for."""
    launcher = find_launcher(request.launcher, environment)

    def command_for(host: str) -> Sequence[str]:
        # An address of IPv6 stands in brackets where a count follows.
        slot = f"[{host}]:1" if ":" in host else f"{host}:1"
        one = replace(request, hosts=slot, hostfile=None, ranks=1)
        return launch_command(one, agent(python), environment, launcher=launcher).argv

    return command_for
