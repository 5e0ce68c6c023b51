"""`penstock checkpoint plan`: estimate the training efficiency of each checkpointing strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cli.options import option, refuse_ignored, required, verb
from penstock.cli.parsers import RATE, SIZE, TIME, above_zero, choice, whole, with_unit
from penstock.cli.terminal import Terminal, table
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.checkpoint.levels.options import Scheme

_RATE = above_zero(RATE)
_MTBF = above_zero(with_unit(TIME, "90d"))


@verb
def plan(
    terminal: Terminal,
    *,
    state_bytes: int = required("--state", above_zero(SIZE), "Total checkpoint size over all ranks."),
    nodes: int = required("--nodes", whole(1), "Number of hosts."),
    fast_bytes_per_s: float = required("--fast", _RATE, "Write bandwidth of one host's cache."),
    slow_bytes_per_s: float = required("--slow", _RATE, "Total write bandwidth of the durable storage."),
    node_mtbf_s: float = required("--node-mtbf", _MTBF, "Mean time between failures of one host."),
    system_mtbf_s: float | None = option(
        "--system-mtbf",
        _MTBF,
        "Mean time between failures that take down several hosts at once (default: never).",
    ),
    network_bytes_per_s: float = option(
        "--network", _RATE, "Network bandwidth of one host.", default="10GiB/s"
    ),
    scheme: str = option(
        "--scheme",
        choice("single", "partner", "xor", "double-parity"),
        "Redundancy scheme of the cache.",
        default="xor",
    ),
    group_size: int = option("--group", whole(), "Hosts in each redundancy group.", default="8"),
    flush_every: int = option(
        "--flush-every", whole(1), "Flush every N-th checkpoint to durable storage.", default="10"
    ),
) -> None:
    r"""Estimate the training efficiency of each checkpointing strategy at its best checkpoint interval.

    Uses a first-order formula (Young/Daly), and checks it against a simulation of random failures.

    Examples:

      penstock checkpoint plan --state 912GiB --nodes 64 --fast 3GiB/s --slow 40GiB/s --node-mtbf 200d

      penstock checkpoint plan --state 1TiB --nodes 16 --fast 2GiB/s --slow 50GiB/s --node-mtbf 90d \
        --system-mtbf 60d --scheme double-parity --json
    """
    from penstock.checkpoint.levels import efficiency_model
    from penstock.checkpoint.levels.options import DoubleParity, Partner, Single, Xor

    machine = efficiency_model.Machine(
        state_bytes=state_bytes,
        nodes=nodes,
        fast_bytes_per_s=fast_bytes_per_s,
        slow_bytes_per_s=slow_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        node_mtbf_s=node_mtbf_s,
        system_mtbf_s=system_mtbf_s,
    )
    if scheme == "single":
        refuse_ignored(("--network", "--group"), "a single copy has no redundancy")
    if group_size > nodes:
        refuse_ignored(
            ("--group",), f"{nodes} hosts form no group of {group_size}", fix=f"Give at most {nodes}."
        )
    members = min(group_size, nodes)
    schemes: dict[str, Callable[[], Scheme]] = {
        "single": Single,
        "partner": lambda: Partner(group=members),
        "xor": lambda: Xor(group=members),
        "double-parity": lambda: DoubleParity(group=members),
    }
    strategies = efficiency_model.build_strategies(machine, schemes[scheme](), flush_every=flush_every)
    predictions = efficiency_model.predict_all(strategies)
    best = max(predictions, key=lambda prediction: prediction.trusted).strategy.name
    document = {
        "best": best,
        "ways": [
            {
                "name": prediction.strategy.name,
                "blocked_s": prediction.strategy.blocked_s,
                "interval_s": prediction.interval_s,
                "efficiency": prediction.efficiency,
                "simulated_efficiency": prediction.simulated,
                "simulated_failures": efficiency_model.NUM_FAILURES,
                "agrees": prediction.agrees,
                "warnings": list(prediction.strategy.warnings),
                "failures": [
                    {
                        "kind": failure.name,
                        "mtbf_s": failure.mtbf_s,
                        "survived_by_every": failure.every,
                        "latency_s": failure.latency_s,
                        "recovery_s": failure.recovery_s,
                        "restored_from": failure.restored_from,
                    }
                    for failure in prediction.strategy.failures
                ],
            }
            for prediction in predictions
        ],
    }
    rows = [
        {
            "way": prediction.strategy.name,
            "blocked": format_seconds(prediction.strategy.blocked_s),
            "every": format_seconds(prediction.interval_s),
            "left for training": f"{prediction.efficiency:.2%}",
            "simulated": f"{prediction.simulated:.2%}",
        }
        for prediction in predictions
    ]
    terminal.result(document, [*table("What is left for training", rows), f"Best: {best}"])
    for one in predictions:
        terminal.notes(f"{one.strategy.name}: {warning}" for warning in one.strategy.warnings)
