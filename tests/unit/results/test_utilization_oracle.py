"""DLIO's formulas against a second, naive implementation that works on lists of floats, as DLIO does."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.run_events import RankScript

from penstock.results.phase_figures import UtilizationWindow, epoch_rates
from penstock.results.step_events import RankEvents, SpanKind, StepPhase

Step = tuple[float, float, float]


@dataclass
class NaiveBlock:
    """What DLIO keeps of a block: lists of seconds, and two readings of the clock."""

    proc: list[float]
    compute: list[float]
    start: float
    end: float


def naive_block(block: NaiveBlock, rule: UtilizationWindow, phase: StepPhase) -> tuple[float, float]:
    start_step = rule.exclude_start_steps
    end_step = rule.num_steps - 1 - rule.exclude_end_steps
    window = block.compute[start_step : end_step + 1]
    total = block.end - block.start - sum(block.proc[:start_step]) - sum(block.proc[end_step + 1 :])
    au = 100 * sum(window) / total if window and total > 1e-12 else 0.0
    if phase is StepPhase.EVAL:
        elapsed = block.end - block.start
        return au, len(block.compute) * rule.batch_size / elapsed if elapsed > 1e-12 else 0.0
    return au, len(window) * rule.batch_size / total if window and total > 1e-12 else 0.0


def naive_epoch(
    ranks: list[list[NaiveBlock]], rule: UtilizationWindow, phase: StepPhase
) -> tuple[float, float]:
    au_sum = throughput_sum = 0.0
    for blocks in ranks:
        weights = [len(block.proc) for block in blocks]
        figures = [naive_block(block, rule, phase) for block in blocks]
        if sum(weights):
            au_sum += sum(au * n for (au, _), n in zip(figures, weights, strict=True)) / sum(weights)
            throughput_sum += sum(rate * n for (_, rate), n in zip(figures, weights, strict=True)) / sum(
                weights
            )
    return au_sum / len(ranks), throughput_sum


def told(
    number: int, blocks: list[list[Step]], harness: float, phase: StepPhase
) -> tuple[RankEvents, list[NaiveBlock]]:
    """The same blocks as our events and as DLIO's lists."""
    script = RankScript(number)
    script.epoch()
    if phase is StepPhase.EVAL:
        script.end_block()
        script.evaluation()
    naive: list[NaiveBlock] = []
    now = 0.0
    for index, steps in enumerate(blocks):
        if index:
            script.checkpoint(SpanKind.SAVE, 1.0, 1)
            script.block()
            now += 1.0
        start = now
        for wait, compute, barrier in steps:
            script.step(wait, compute, barrier)
            now += wait + compute + barrier
        script.pass_time(harness)
        script.end_block()
        now += harness
        proc = [wait + compute for wait, compute, _ in steps]
        naive.append(NaiveBlock(proc, [compute for _, compute, _ in steps], start, now))
    script.end_epoch()
    return script.events(), naive


seconds = st.integers(0, 5000).map(lambda milliseconds: milliseconds / 1000)
steps = st.lists(st.tuples(seconds, seconds, seconds), min_size=0, max_size=6)
rules = st.builds(
    UtilizationWindow,
    num_steps=st.integers(0, 12),
    exclude_start_steps=st.integers(0, 4),
    exclude_end_steps=st.integers(0, 4),
    batch_size=st.integers(1, 8),
)


@given(
    st.lists(st.lists(steps, min_size=1, max_size=3), min_size=1, max_size=3),
    seconds,
    rules,
    st.sampled_from(StepPhase),
)
@settings(max_examples=2 * settings().max_examples)
def test_both_implementations_agree_on_any_table(
    tables: list[list[list[Step]]], harness: float, rule: UtilizationWindow, phase: StepPhase
) -> None:
    if phase is StepPhase.EVAL:
        tables = [blocks[:1] for blocks in tables]
    pairs = [told(number, blocks, harness, phase) for number, blocks in enumerate(tables)]
    (rate,) = epoch_rates([events for events, _ in pairs], rule, phase)
    au, throughput = naive_epoch([naive for _, naive in pairs], rule, phase)
    assert rate.au_compat_percent == pytest.approx(au, abs=1e-6)
    assert rate.samples_per_s_compat == pytest.approx(throughput, rel=1e-6, abs=1e-6)


@given(st.lists(steps, min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 3))
def test_strict_excludes_once_an_epoch_however_it_is_cut_into_blocks(
    blocks: list[list[Step]], start: int, end: int
) -> None:
    rule = UtilizationWindow(num_steps=99, exclude_start_steps=start, exclude_end_steps=end, batch_size=1)
    cut, _ = told(0, blocks, 0.0, StepPhase.TRAIN)
    whole, _ = told(0, [[step for block in blocks for step in block]], 0.0, StepPhase.TRAIN)
    (of_cut,), (of_whole,) = (epoch_rates([events], rule, StepPhase.TRAIN) for events in (cut, whole))
    assert of_cut.au_strict_percent == of_whole.au_strict_percent
