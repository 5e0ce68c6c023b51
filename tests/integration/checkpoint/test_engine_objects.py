"""The whole engine on object services: round trips, and a service that stops answering at any request."""

import itertools
import os
from pathlib import Path

import pytest
from tests.support.known_states import restored, save_state
from tests.support.s3.fake_bucket import FakeBucket
from tests.support.s3.fake_server import running_fake
from tests.support.s3.fault_plan import ALWAYS, Fault
from tests.support.s3.server import BUCKET, S3Server

from penstock.errors import PenstockError
from penstock.storage import Storage, open_storage

IMPATIENT = {"attempts": "1", "backoff_s": "1ms", "request_timeout_s": "20s"}
_corners = itertools.count()


def objects(server: S3Server, corner: str, **options: str) -> Storage:
    uri = f"s3://{BUCKET}/{corner}/run"
    return open_storage(uri, server.environment, options={**IMPATIENT, **options})


@pytest.mark.parametrize("service", ["moto", "radosgw"])
def test_a_run_on_an_object_service_is_saved_replaced_and_restored(
    request: pytest.FixtureRequest, service: str
) -> None:
    server: S3Server = request.getfixturevalue(service)
    storage = objects(server, f"run-{os.getpid()}-{next(_corners)}")
    assert restored(storage) is None
    save_state(storage, 1, 0)
    save_state(storage, 2, 0)
    save_state(storage, 2, 1)
    assert restored(storage) == (2, 1)
    save_state(storage, 3, 0)
    keys = sorted(info.key for info in storage.list())
    assert {key.partition("/")[0] for key in keys} == {"latest", "step-2", "step-3"}
    # Two files, metadata, manifest and the record of each step, and the pointer: nothing is left of others.
    assert len(keys) == 2 * 5 + 1


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [2, 1])
def test_a_service_that_stops_at_any_request_leaves_a_known_step(step: int, every: int) -> None:
    with running_fake() as server:
        save_state(objects(server.as_server(), "counted"), 1, 0)
        before = server.requests.total()
        save_state(objects(server.as_server(), "counted"), step, 1)
        most = server.requests.total() - before
    # The lease of the manager is four of them: read and written, read again and deleted. Its first save lists
    # the steps once more, to tell of newer ones.
    assert 12 <= most <= 23, "each request of a save is paid for, and one that is left out was needed"
    num_failed = 0
    for number in range(1, most + 1, every):
        bucket = FakeBucket()
        with running_fake(bucket=bucket) as healthy:
            save_state(objects(healthy.as_server(), "run"), 1, 0)
            stop = Fault(action="refuse", nth=number, times=ALWAYS, status=403, code="AccessDenied")
            with running_fake(stop, bucket=bucket) as stopping:
                try:
                    save_state(objects(stopping.as_server(), "run"), step, 1)
                except PenstockError:
                    num_failed += 1
            found = restored(objects(healthy.as_server(), "run"))
            assert found in ({(1, 0), (2, 1)} if step == 2 else {(1, 0), (1, 1)})
    assert num_failed > 0


def test_bytes_that_a_service_lost_let_the_step_before_be_restored(tmp_path: Path) -> None:
    bucket = FakeBucket()
    with running_fake(bucket=bucket) as server:
        storage = objects(server.as_server(), "run")
        save_state(storage, 1, 0)
        save_state(storage, 2, 1)
        (damaged,) = (key for key in bucket.keys if "step-2/" in key and key.endswith("__0_0.distcp"))
        content = bytearray(bucket.get(damaged).content)
        content[len(content) // 2] ^= 1
        bucket.put(damaged, bytes(content))
        assert restored(storage) == (1, 0)
