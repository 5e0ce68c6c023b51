"""What the whole test suite shares."""

from __future__ import annotations

import pytest
from hypothesis import settings

from penstock.testing.server_fixtures import moto, radosgw

__all__ = ["moto", "radosgw"]

pytest.register_assert_rewrite("penstock.testing.contract")

# Tests hold invariants, benchmarks hold speed: on a busy machine a deadline fails what is right.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")
