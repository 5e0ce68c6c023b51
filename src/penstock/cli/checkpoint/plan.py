"""`penstock checkpoint plan`: which level pays, how often to save, and what is left for training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import values
from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from penstock.checkpoint.levels.efficiency_model import Outlook, Protection

_SCHEMES = ("single", "partner", "xor", "double-parity")


_State = Annotated[str, typer.Option("--state", metavar="SIZE", help="Bytes of one checkpoint, in all.")]
_Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Hosts of the job.")]
_Fast = Annotated[str, typer.Option("--fast", metavar="RATE", help="One host's cache takes so much.")]
_Slow = Annotated[
    str, typer.Option("--slow", metavar="RATE", help="The durable storage takes so much, in all.")
]
_NodeMtbf = Annotated[str, typer.Option("--node-mtbf", metavar="TIME", help="One host fails so often.")]
_ProcessMtbf = Annotated[
    str | None, typer.Option("--process-mtbf", metavar="TIME", help="The job loses a process so often.")
]
_SystemMtbf = Annotated[
    str | None, typer.Option("--system-mtbf", metavar="TIME", help="Several hosts go at once so often.")
]
_Network = Annotated[str, typer.Option("--network", metavar="RATE", help="One host sends so much.")]
_Scheme = Annotated[
    str, typer.Option("--scheme", metavar="NAME", help="single, partner, xor or double-parity.")
]
_Group = Annotated[int, typer.Option("--group", help="Members that protect each other.")]
_FlushEvery = Annotated[
    int, typer.Option("--flush-every", min=1, help="Every so manieth checkpoint becomes durable.")
]
_Restart = Annotated[
    str, typer.Option("--restart", metavar="TIME", help="From a failure until loading begins.")
]
_Interval = Annotated[
    str | None, typer.Option("--interval", metavar="TIME", help="Else each way's own best.")
]


def plan(
    *,
    state: _State,
    nodes: _Nodes,
    fast: _Fast,
    slow: _Slow,
    node_mtbf: _NodeMtbf,
    process_mtbf: _ProcessMtbf = None,
    system_mtbf: _SystemMtbf = None,
    network: _Network = "10GiB/s",
    scheme: _Scheme = "xor",
    group: _Group = 8,
    flush_every: _FlushEvery = 10,
    restart: _Restart = "2min",
    interval: _Interval = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the simulated failures.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Tell what share of the time each way of checkpointing leaves for training, and what it warns of.

    A formula of the first order, checked by a simulation of failures that come by chance.

    Examples:

      penstock checkpoint plan --state 912GiB --nodes 64 --fast 3GiB/s --slow 40GiB/s --node-mtbf 200d

      penstock checkpoint plan --state 1TiB --nodes 16 --fast 2GiB/s --slow 50GiB/s --node-mtbf 90d
      --system-mtbf 60d --scheme double-parity --interval 10min --json
    """
    import numpy as np

    from penstock.checkpoint.levels.efficiency_model import Machine, at_best, ways

    machine = Machine(
        state_bytes=values.size("--state", state),
        nodes=nodes,
        fast_bytes_per_s=_positive("--fast", values.rate("--fast", fast)),
        slow_bytes_per_s=_positive("--slow", values.rate("--slow", slow)),
        network_bytes_per_s=_positive("--network", values.rate("--network", network)),
        restart_s=values.seconds("--restart", restart),
        process_mtbf_s=_apart("--process-mtbf", process_mtbf),
        node_mtbf_s=_apart("--node-mtbf", node_mtbf),
        system_mtbf_s=_apart("--system-mtbf", system_mtbf),
    )
    found = at_best(
        ways(machine, _protection(scheme, group, nodes), flush_every=flush_every),
        interval_s=None
        if interval is None
        else _positive("--interval", values.seconds("--interval", interval)),
        random=np.random.default_rng(seed),
    )
    _tell(found, Terminal(as_json=as_json))


def _tell(found: list[Outlook], terminal: Terminal) -> None:
    terminal.result(_document(found), table("What is left for training", _rows(found)))
    for each in found:
        for warning in each.way.warnings:
            terminal.note(f"{each.way.name}: {warning}")
        if not each.agrees:
            terminal.note(
                f"{each.way.name}: the simulation says {each.simulated:.1%}, because failures come faster "
                "than the formula assumes; believe the simulation"
            )


def _apart(option: str, text: str | None) -> float:
    """A mean time between failures; what is not given never happens."""
    import math

    return math.inf if text is None else _positive(option, values.seconds(option, text))


def _protection(scheme: str, group: int, nodes: int) -> Protection:
    from penstock.checkpoint.levels.efficiency_model import Protection
    from penstock.checkpoint.levels.options import DoubleParity, Partner, Scheme, Single, Xor
    from penstock.errors import UsageError

    if scheme not in _SCHEMES:
        raise UsageError(f"--scheme {scheme}: no such scheme", fix=f"Use one of {', '.join(_SCHEMES)}.")
    members = min(group, nodes)
    grouped = {"partner": Partner, "xor": Xor, "double-parity": DoubleParity}
    chosen: Scheme = Single() if scheme == "single" else grouped[scheme](group=members)
    share = chosen.kept_share(members)
    return Protection(name=chosen.name, losses=chosen.losses, kept_share=share, group=members)


def _positive(option: str, value: float) -> float:
    from penstock.errors import UsageError

    if value <= 0:
        raise UsageError(f"{option} must be above 0", fix="Give what was measured, or specified.")
    return value


def _document(found: list[Outlook]) -> dict[str, Any]:
    best = max(found, key=lambda each: each.efficiency)
    return {
        "best": best.way.name,
        "ways": [
            {
                "name": each.way.name,
                "blocked_s": each.way.blocked_s,
                "interval_s": each.interval_s,
                "efficiency": each.efficiency,
                "simulated_efficiency": each.simulated,
                "simulated_failures": each.num_failures,
                "agrees": each.agrees,
                "warnings": list(each.way.warnings),
                "failures": [
                    {
                        "kind": failure.name,
                        "mtbf_s": failure.mtbf_s,
                        "survived_by_every": failure.every,
                        "latency_s": failure.latency_s,
                        "recovery_s": failure.recovery_s,
                        "restored_from": failure.restored_from,
                    }
                    for failure in each.way.failures
                ],
            }
            for each in found
        ],
    }


def _rows(found: list[Outlook]) -> list[dict[str, str]]:
    from penstock.units import format_seconds

    return [
        {
            "way": each.way.name,
            "blocked": format_seconds(each.way.blocked_s),
            "every": format_seconds(each.interval_s),
            "left for training": f"{each.efficiency:.2%}",
            "simulated": f"{each.simulated:.2%}",
        }
        for each in found
    ]
