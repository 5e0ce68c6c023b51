"""What the whole test suite shares."""

from __future__ import annotations

import pytest

from penstock.testing.server_fixtures import moto, radosgw

__all__ = ["moto", "radosgw"]

pytest.register_assert_rewrite("penstock.testing.contract")
