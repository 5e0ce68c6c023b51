"""The rule that holds epochs against all samples counts as the plan of a training run does."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.bench.epoch_order import Remainder
from penstock.bench.training.training_plan import (
    RankEpoch,
    SampleSet,
    Sharding,
    count_rank_share,
    left_out_by_division,
    summarize_samples,
)
from penstock.submission.rules.dataset_rules import digest_of_all
from penstock.workload.enums import Shuffle


@given(
    num_files=st.integers(1, 40),
    samples_per_file=st.integers(1, 12),
    item_samples=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    division=st.sampled_from([Remainder.ROTATE, Remainder.DROP]),
    epoch=st.integers(1, 5),
)
def test_an_epoch_of_a_plan_comes_to_all_samples(  # noqa: PLR0917 - Hypothesis gives them by name
    num_files: int, samples_per_file: int, item_samples: int, num_ranks: int, division: Remainder, epoch: int
) -> None:
    item_samples = min(item_samples, samples_per_file)
    deal = Sharding(
        num_files=num_files,
        samples_per_file=samples_per_file,
        block_samples=item_samples,
        item_samples=item_samples,
        group=1,
        batch_size=1,
        num_ranks=num_ranks,
        division=division,
        seed=7,
        shuffle=Shuffle.SEED,
        window_samples=0,
    )
    assume(deal.num_items >= num_ranks)  # fewer are refused before any plan
    total = left_out_by_division(deal, epoch)
    for rank in range(num_ranks):
        order = RankEpoch(deal, rank=rank, epoch=epoch)
        steps = order.count_samples()
        taken, left_out = count_rank_share(order, num_steps=steps, full_steps=steps)
        total += taken + left_out
    expected = digest_of_all(num_files * samples_per_file, item_samples, samples_per_file)
    assert total == SampleSet(samples=num_files * samples_per_file, digest=expected)


def test_many_items_are_hashed_piece_by_piece() -> None:
    num_samples = (1 << 20) + 3
    ones = np.ones(num_samples, dtype=np.int64)
    assert (
        digest_of_all(num_samples, 1, 1)
        == summarize_samples(np.arange(num_samples, dtype=np.int64), ones).digest
    )
