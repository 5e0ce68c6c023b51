"""The contract suite through s3dlio, on the one endpoint that its process has: run by `test_s3dlio`."""

from __future__ import annotations

import itertools
import os

import pytest
from tests.support.s3.server import BUCKET, S3Server

from penstock.environment import process_environment
from penstock.storage import Storage, open_storage
from penstock.testing.storage_contract import StorageContract

_corners = itertools.count()


class TestS3dlio(StorageContract):
    delete_missing_is_silent = True

    @pytest.fixture
    def storage(self) -> Storage:
        server = S3Server("given", process_environment()["PENSTOCK_TEST_ENDPOINT"])
        return open_storage(
            f"s3://{BUCKET}/s3dlio-{os.getpid()}-{next(_corners)}",
            server.environment,
            options={"client": "s3dlio", "part_bytes": "5MiB", "request_timeout_s": "20s", "attempts": "2"},
        )
