"""`penstock checkpoint plan`: estimate the training efficiency of each checkpointing strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.option_groups import PAGE, write_page
from penstock.cli.options import option, required, verb
from penstock.cli.parsers import RATE, SIZE, TIME, above_zero, choice, whole, with_unit
from penstock.cli.terminal import Terminal, table
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.checkpoint.levels.efficiency_model import Prediction
    from penstock.reports.report import Report

_RATE = above_zero(RATE)
_TIME = above_zero(TIME)
_MTBF = above_zero(with_unit(TIME, "90d"))


@verb
def plan(
    terminal: Terminal,
    *,
    state_bytes: int = required("--state", SIZE, "Total checkpoint size over all ranks."),
    nodes: int = required("--nodes", whole(1), "Number of hosts."),
    fast_bytes_per_s: float = required("--fast", _RATE, "Write bandwidth of one host's cache."),
    slow_bytes_per_s: float = required("--slow", _RATE, "Total write bandwidth of the durable storage."),
    node_mtbf_s: float = required("--node-mtbf", _MTBF, "Mean time between failures of one host."),
    process_mtbf_s: float | None = option(
        "--process-mtbf",
        _MTBF,
        "Mean time between failures of a process of the job (default: never).",
    ),
    system_mtbf_s: float | None = option(
        "--system-mtbf",
        _MTBF,
        "Mean time between failures of several hosts at once (default: never).",
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
    restart_s: float = option("--restart", TIME, "Time from a failure until loading begins.", default="2min"),
    interval_s: float | None = option(
        "--interval", _TIME, "Time between saves (default: the best for each strategy)."
    ),
    seed: int = option("--seed", whole(), "Seed of the simulated failures.", default="1"),
    page: Path | None = PAGE,
) -> None:
    r"""Estimate training efficiency for each checkpointing strategy.

    Uses a first-order formula (Young/Daly), and checks it with a simulation of random failures.

    Examples:

      penstock checkpoint plan --state 912GiB --nodes 64 --fast 3GiB/s --slow 40GiB/s --node-mtbf 200d

      penstock checkpoint plan --state 1TiB --nodes 16 --fast 2GiB/s --slow 50GiB/s --node-mtbf 90d \
        --system-mtbf 60d --scheme double-parity --interval 10min --json
    """
    import numpy as np

    from penstock.checkpoint.levels import efficiency_model
    from penstock.checkpoint.levels.options import DoubleParity, Partner, Scheme, Single, Xor

    machine = efficiency_model.Machine(
        state_bytes=state_bytes,
        nodes=nodes,
        fast_bytes_per_s=fast_bytes_per_s,
        slow_bytes_per_s=slow_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        restart_s=restart_s,
        # Failures without a rate never happen.
        process_mtbf_s=process_mtbf_s or math.inf,
        node_mtbf_s=node_mtbf_s,
        system_mtbf_s=system_mtbf_s or math.inf,
    )
    members = min(group_size, nodes)
    schemes: dict[str, Callable[[], Scheme]] = {
        "single": Single,
        "partner": lambda: Partner(group=members),
        "xor": lambda: Xor(group=members),
        "double-parity": lambda: DoubleParity(group=members),
    }
    strategies = efficiency_model.build_strategies(machine, schemes[scheme](), flush_every=flush_every)
    predictions = efficiency_model.predict_all(
        strategies, interval_s=interval_s, random=np.random.default_rng(seed)
    )
    write_page(page, lambda: _report(predictions), terminal)
    document = {
        "best": max(predictions, key=lambda prediction: prediction.efficiency).strategy.name,
        "ways": [
            {
                "name": prediction.strategy.name,
                "blocked_s": prediction.strategy.blocked_s,
                "interval_s": prediction.interval_s,
                "efficiency": prediction.efficiency,
                "simulated_efficiency": prediction.simulated,
                "simulated_failures": prediction.num_failures,
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
    terminal.result(document, table("What is left for training", _rows(predictions)))
    terminal.notes(_list_doubts(predictions))


def _report(predictions: Sequence[Prediction]) -> Report:
    """The share of time that each strategy leaves for training."""
    from penstock.reports.report import Banner, Look, Report, bar_chart, table_section

    best = max(predictions, key=lambda one: one.efficiency)
    strategy, interval = best.strategy, format_seconds(best.interval_s)
    letters = [chr(ord("A") + number) for number in range(len(predictions))]
    note = "; ".join(
        f"{letter} {one.strategy.name}" for letter, one in zip(letters, predictions, strict=True)
    )
    failing = [failure for failure in strategy.failures if failure.mtbf_s < math.inf]
    worst = min(failing, key=lambda failure: failure.mtbf_s, default=None)
    charts = {
        ("Lost to checkpoints and failures, simulated", "%"): [
            100 * (1 - one.simulated) for one in predictions
        ],
        ("Training waits at each checkpoint", "s"): [one.strategy.blocked_s for one in predictions],
    }
    return Report(
        title="What checkpoints leave for training",
        subtitle=f"{len(predictions)} strategies, each at its interval, by formula and by simulated failures",
        banner=Banner(
            verdict="best",
            look=Look.PLAIN,
            figure=f"{strategy.name}, every {interval}: {best.efficiency:.1%} of the time is left for "
            f"training ({best.simulated:.1%} by the simulation)",
            limited_by=f"{format_seconds(strategy.blocked_s)} that training waits at each checkpoint"
            + ("" if worst is None else f", and {worst.name} failures every {format_seconds(worst.mtbf_s)}"),
            since="the first checkpoint",
            to_do=f"Save every {interval} with {strategy.name}.",
            troubles=_list_doubts(predictions),
        ),
        highlights=[
            bar_chart(title, "plan", dict(zip(letters, values, strict=True)), unit, note=note)
            for (title, unit), values in charts.items()
        ],
        sections=[table_section("strategies", "All strategies", _rows(predictions))],
    )


def _list_doubts(predictions: Sequence[Prediction]) -> list[str]:
    doubts = []
    for one in predictions:
        doubts += [f"{one.strategy.name}: {warning}" for warning in one.strategy.warnings]
        if not one.agrees:
            doubts.append(
                f"{one.strategy.name}: the simulation gives {one.simulated:.1%}, as failures come faster "
                "than the formula assumes; trust the simulation"
            )
    return doubts


def _rows(predictions: Sequence[Prediction]) -> list[dict[str, str]]:
    return [
        {
            "way": prediction.strategy.name,
            "blocked": format_seconds(prediction.strategy.blocked_s),
            "every": format_seconds(prediction.interval_s),
            "left for training": f"{prediction.efficiency:.2%}",
            "simulated": f"{prediction.simulated:.2%}",
        }
        for prediction in predictions
    ]
