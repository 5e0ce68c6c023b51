"""Fresh buckets and prefixes on S3 servers, and the clients as test parameters."""

import itertools
import os
from collections.abc import Callable

import pytest
from tests.support.s3.server import BUCKET, S3Server

from penstock.storage import Storage, open_storage

PATIENCE = {"request_timeout_s": "20s", "attempts": "2", "backoff_s": "20ms", "part_bytes": "5MiB"}
"""Bounded in every way, and with the smallest parts that S3 takes."""

S3DLIO_PATIENCE = {"request_timeout_s": "3s"}
"""One timeout for all of its tests in this process, because it reads it once."""

_corners = itertools.count()

OpenCorner = Callable[..., Storage]


@pytest.fixture
def corner() -> OpenCorner:
    """Opens a prefix that nobody else uses, on a given server, with a given client and options."""

    def open_corner(server: S3Server, client: str, **options: str) -> Storage:
        uri = f"s3://{BUCKET}/corner-{os.getpid()}-{next(_corners)}/deep"
        limits = {**PATIENCE, **(S3DLIO_PATIENCE if client == "s3dlio" else {})}
        return open_storage(uri, server.environment, options={"client": client, **limits, **options})

    return open_corner
