from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from tests.integration.checkpoint.adapters.peers import Programs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """The programs that use a framework, for all tests of adapters."""
    with closing(Programs()) as running:
        yield running
