"""Which scheme protects which checkpoint."""

import pytest

from penstock.checkpoint.levels.options import (
    DoubleParity,
    Partner,
    Single,
    Xor,
    check_schemes,
    scheme_for,
)
from penstock.errors import UsageError


def test_the_largest_interval_that_divides_the_number_wins() -> None:
    schemes = [Single(every=1), Partner(every=4), Xor(group=8, every=16)]
    chosen = [scheme_for(number, schemes).name for number in (1, 4, 8, 15, 16, 32)]
    assert chosen == ["single", "partner", "partner", "single", "xor", "xor"]


def test_a_checkpoint_without_a_scheme_is_refused_before_it_is_saved() -> None:
    with pytest.raises(UsageError, match="No redundancy scheme applies to every checkpoint"):
        check_schemes([Partner(every=4)])
    with pytest.raises(UsageError, match="No redundancy scheme applies to every checkpoint"):
        check_schemes([])
    with pytest.raises(UsageError, match="Two redundancy schemes have every=4"):
        check_schemes([Single(), Partner(every=4), Xor(every=4)])
    check_schemes([Single(), Partner(every=4)])


def test_invalid_groups_and_intervals_are_refused() -> None:
    with pytest.raises(UsageError, match="every must be at least 1"):
        Single(every=0)
    with pytest.raises(UsageError, match="Invalid group of 1"):
        Xor(group=1)
    with pytest.raises(UsageError, match="Invalid group of 2"):
        DoubleParity(group=2)
    with pytest.raises(UsageError, match="Invalid group of 500"):
        Partner(group=500)
