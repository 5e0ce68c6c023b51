"""s3dlio has one endpoint per process, so the contract suite runs in a process for each server."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.s3.fake_server import FakeServer, running_fake
from tests.support.s3.server import BUCKET, S3Server

from penstock.environment import process_environment
from penstock.errors import StorageError, UsageError
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import read_object, write_object

OpenCorner = Callable[..., Storage]

SUITE = Path(__file__).parent / "programs" / "s3dlio_contract.py"


def _pass_contract(server: S3Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", str(SUITE)],
        env={**process_environment(), "PENSTOCK_TEST_ENDPOINT": server.endpoint},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_s3dlio_passes_the_contract_on_the_fake() -> None:
    with running_fake() as server:
        _pass_contract(server.as_server())


def test_s3dlio_passes_the_contract_on_moto(moto: S3Server) -> None:
    _pass_contract(moto)


def test_s3dlio_passes_the_contract_on_radosgw(radosgw: S3Server) -> None:
    _pass_contract(radosgw)


def test_a_second_endpoint_serves_whole_objects_and_refuses_parts(
    lasting_fake: FakeServer, corner: OpenCorner
) -> None:
    corner(lasting_fake.as_server(), "s3dlio")
    with running_fake() as second:
        storage = corner(second.as_server(), "s3dlio")
        write_object(storage, "whole", [b"content"])
        assert read_object(storage, "whole") == b"content"
        with pytest.raises(StorageError, match="first endpoint"):
            write_object(storage, "parted", [bytes(6 * 1024 * 1024)])
        assert second.bucket.open_uploads == []


def test_other_settings_than_the_first_are_refused(lasting_fake: FakeServer, corner: OpenCorner) -> None:
    corner(lasting_fake.as_server(), "s3dlio")
    with pytest.raises(UsageError, match="S3DLIO_UNSIGNED_PAYLOAD"):
        corner(lasting_fake.as_server(), "s3dlio", payload="signed")


@pytest.mark.parametrize("option", ["path_style", "tls_verify"])
def test_what_s3dlio_cannot_switch_off_is_refused(lasting_fake: FakeServer, option: str) -> None:
    with pytest.raises(UsageError, match=option):
        open_storage(
            f"s3://{BUCKET}",
            lasting_fake.as_server().environment,
            options={"client": "s3dlio", option: "false"},
        )
