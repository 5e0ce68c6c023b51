from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.integration.checkpoint.adapters.peers import Programs


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """The programs that use a framework, for all tests of adapters."""
    with closing(Programs()) as running:
        yield running
