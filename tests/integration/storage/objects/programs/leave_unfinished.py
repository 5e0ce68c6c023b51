"""Begin an object, send some of it, and exit without finishing or aborting it."""

from __future__ import annotations

import sys

from tests.support.s3.server import BUCKET, S3Server

from penstock.storage import open_storage


def main(endpoint: str, client: str) -> None:
    storage = open_storage(
        f"s3://{BUCKET}", S3Server("given", endpoint).environment, options={"client": client}
    )
    sink = storage.create("unfinished")
    sink.submit(memoryview(bytes(20 * 1024 * 1024)))
    sys.stdout.write("left\n")


main(*sys.argv[1:])
