"""What the whole test suite shares."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("penstock.testing.contract")
