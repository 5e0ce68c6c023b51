"""S3 servers as pytest fixtures: import what you need into a `conftest.py`.

A server starts once a session, and only if a test asks for it; without its programs the tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from penstock.errors import Unavailable

if TYPE_CHECKING:
    from penstock.testing.server_fake import FakeServer
    from penstock.testing.servers import S3Server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """Moto's server: pip brings it, so it is always there."""
    from penstock.testing.server_moto import running_moto  # noqa: PLC0415 - only if a test asks

    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def radosgw() -> Iterator[S3Server]:
    """Ceph's server, which checks signatures; the test is skipped where Ceph is not installed."""
    from penstock.testing.server_radosgw import missing_programs, running_radosgw  # noqa: PLC0415 - as above

    if missing := missing_programs():
        pytest.skip(f"Ceph is not installed here ({', '.join(missing)}): run scripts/components.sh as root")
    try:
        with running_radosgw() as server:
            yield server
    except Unavailable as error:
        pytest.skip(f"Ceph is installed but did not start: {error}")


@pytest.fixture(scope="session")
def lasting_fake() -> Iterator[FakeServer]:
    """One fake for the whole session: some clients know one endpoint per process. `faulty` gives it plans."""
    from penstock.testing.server_fake import running_fake  # noqa: PLC0415 - only if a test asks

    with running_fake() as server:
        yield server


@pytest.fixture
def faulty(lasting_fake: FakeServer) -> Callable[..., FakeServer]:
    """The lasting fake with these faults, and nothing else on it."""
    from penstock.testing.server_fake_store import FakeBucket  # noqa: PLC0415 - only if a test asks
    from penstock.testing.server_plan import Fault, FaultPlan  # noqa: PLC0415 - as above

    def start(*faults: Fault) -> FakeServer:
        lasting_fake.plan = FaultPlan(*faults)
        lasting_fake.bucket = FakeBucket()
        lasting_fake.requests.clear()
        lasting_fake.payload_modes.clear()
        return lasting_fake

    return start
