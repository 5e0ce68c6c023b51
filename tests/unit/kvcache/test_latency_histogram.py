"""Histograms add up over ranks, and their percentiles are those of all values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kvcache.cache_figures import LatencyHistogram


@given(st.lists(st.lists(st.integers(0, 2**50), max_size=30), min_size=1, max_size=4))
def test_percentiles_of_merged_histograms_are_those_of_all_values(ranks: list[list[int]]) -> None:
    values = np.array([value for rank in ranks for value in rank], np.int64)
    merged = LatencyHistogram.merged(LatencyHistogram.of(np.array(rank, np.int64)) for rank in ranks)
    assert merged.counts.sum() == len(values)
    for percent in (1, 50, 95, 99.99, 100):
        found = merged.percentile_ms(percent)
        if not len(values):
            assert found is None
        else:
            exact = np.percentile(values, percent, method="inverted_cdf") / 1e6
            assert found == pytest.approx(exact, rel=0.004)
    if len(values):
        assert merged.document()["mean"] == pytest.approx(values.mean() / 1e6)
        assert merged.document()["max"] == values.max() / 1e6
