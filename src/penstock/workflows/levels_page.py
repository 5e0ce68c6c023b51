"""Pages of checkpoint levels: where the steps of a run are, and what strategies leave of training."""

from collections.abc import Iterator, Mapping, Sequence

from penstock.checkpoint.levels.cache_tools import LevelsOverview
from penstock.checkpoint.levels.efficiency_model import Prediction
from penstock.reports.report import Banner, Look, Report, bar_chart, table_section
from penstock.units import format_bytes, format_rate, format_seconds

Rows = Sequence[Mapping[str, str]]


def make_plan_page(predictions: Sequence[Prediction], rows: Rows) -> Report:
    """What is left for training with each strategy."""
    best = max(predictions, key=lambda one: one.efficiency)
    names = [chr(ord("A") + number) for number in range(len(predictions))]
    meaning = "; ".join(f"{name} {one.strategy.name}" for name, one in zip(names, predictions, strict=True))
    waits = [one.strategy.blocked_s for one in predictions]
    lost = {name: 100 * (1 - one.simulated) for name, one in zip(names, predictions, strict=True)}
    failing = [failure for failure in best.strategy.failures if failure.mtbf_s < float("inf")]
    worst = min(failing, key=lambda failure: failure.mtbf_s, default=None)
    return Report(
        title="What checkpoints leave for training",
        subtitle=f"{len(predictions)} strategies, each at its interval, by formula and by simulated failures",
        banner=Banner(
            verdict="best",
            look=Look.PLAIN,
            figure=(
                f"{best.strategy.name}, every {format_seconds(best.interval_s)}: {best.efficiency:.1%} of "
                f"the time is left for training ({best.simulated:.1%} by the simulation)"
            ),
            limited_by=f"{format_seconds(best.strategy.blocked_s)} that training waits at each checkpoint"
            + ("" if worst is None else f", and {worst.name} failures every {format_seconds(worst.mtbf_s)}"),
            since="the first checkpoint",
            to_do=f"Save every {format_seconds(best.interval_s)} with {best.strategy.name}.",
            troubles=list(_find_doubts(predictions)),
        ),
        highlights=[
            bar_chart("Lost to checkpoints and failures, simulated", "plan", lost, "%", note=meaning),
            bar_chart(
                "Training waits at each checkpoint",
                "plan",
                dict(zip(names, waits, strict=True)),
                "s",
                note=meaning,
            ),
        ],
        sections=[table_section("strategies", "All strategies", rows)],
    )


def _find_doubts(predictions: Sequence[Prediction]) -> Iterator[str]:
    for one in predictions:
        if not one.agrees:
            yield (
                f"{one.strategy.name}: the simulation says {one.simulated:.1%}; trust it, as failures come "
                "faster than the formula assumes."
            )
        yield from (f"{one.strategy.name}: {warning}" for warning in one.strategy.warnings)


def make_status_page(run: str, levels: LevelsOverview, rows: Rows) -> Report:
    """Where the steps of a run are, and what is still to be copied."""
    states = {
        step: state for flush in levels.flushes for step, state in flush.states.items() if not state.is_over
    }
    failing = {step: state for step, state in states.items() if state.phase == "failing"}
    steps = levels.steps
    rates = [flush.bytes_per_s for flush in levels.flushes if flush.bytes_per_s]
    durable = max(levels.durable, default=None)
    behind = [step for step in steps if durable is None or step > durable]
    newest = str(max(steps, default="none"))
    by_step = {str(step): state.size_bytes - state.copied_bytes for step, state in states.items()}
    cached = {str(one.step): one.size_bytes for one in levels.cached}
    return Report(
        title=f"Checkpoints of {run}",
        subtitle=f"{len(steps)} step{'s' * (len(steps) != 1)}, on the durable level and "
        f"{len(levels.flushes)} cache{'s' * (len(levels.flushes) != 1)}",
        banner=Banner(
            verdict="failing" if failing else "copying" if states else "durable",
            look=Look.BAD if failing else Look.DOUBT if states else Look.GOOD,
            figure=(
                f"newest durable step {'none' if durable is None else durable}, newest of all {newest}; "
                f"{format_bytes(levels.left_bytes)} to copy"
            ),
            limited_by=_say_pace(rates, levels),
            since=f"step {behind[0]} is not durable yet" if behind else "every step is durable",
            to_do="Fix what the failing flushes report; they are tried again."
            if failing
            else "Wait, or run `penstock checkpoint flush` on each node."
            if states
            else "Nothing.",
            troubles=[f"Step {step}: {state.reason}" for step, state in failing.items()]
            + [f"Step {one.step}: {one.reason}" for one in levels.cached if one.reason],
        ),
        highlights=[
            bar_chart(title, run, {name: float(size) for name, size in sizes.items()}, "B")
            for title, sizes in (("Left to copy, by step", by_step), ("In the caches, by step", cached))
            if sizes
        ],
        sections=[table_section("steps", "All steps", rows)],
    )


def _say_pace(rates: Sequence[float], levels: LevelsOverview) -> str:
    paused = [flush.cache for flush in levels.flushes if flush.is_paused]
    if paused:
        return f"flushes of {len(paused)} caches are paused for a save"
    if not rates:
        return "no flush is under way"
    left_s = levels.left_bytes / sum(rates)
    return f"flushes with {format_rate(sum(rates))}: done in about {format_seconds(left_s)}"
