"""S3 servers as pytest fixtures: import what you need into a `conftest.py`.

A server starts once a session, and only if a test asks for it; without its programs the tests are skipped.
"""

from collections.abc import Callable, Iterator

import pytest
from tests.support.s3.fake_server import FakeServer
from tests.support.s3.server import S3Server

from penstock.errors import Unavailable


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """Moto's server: pip brings it, so it is always there."""
    from tests.support.s3.moto_server import running_moto

    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def radosgw() -> Iterator[S3Server]:
    """Ceph's server, which checks signatures; the test is skipped where Ceph is not installed."""
    from tests.support.s3.radosgw_server import missing_programs, running_radosgw

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
    from tests.support.s3.fake_server import running_fake

    with running_fake() as server:
        yield server


@pytest.fixture
def faulty(lasting_fake: FakeServer) -> Iterator[Callable[..., FakeServer]]:
    """The lasting fake with these faults, and nothing else on it. The next test finds it without faults."""
    from tests.support.s3.fake_bucket import FakeBucket
    from tests.support.s3.fault_plan import Fault, FaultPlan

    def start(*faults: Fault) -> FakeServer:
        lasting_fake.plan = FaultPlan(*faults)
        lasting_fake.bucket = FakeBucket()
        lasting_fake.requests.clear()
        lasting_fake.payload_modes.clear()
        return lasting_fake

    yield start
    lasting_fake.plan = FaultPlan()
