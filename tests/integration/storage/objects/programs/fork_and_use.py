"""Use a storage, fork, and use it in the child at the same time: both print what they could read."""

from __future__ import annotations

import os
import signal
import sys

from tests.support.s3.server import BUCKET, S3Server

from penstock.errors import UsageError
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import read_object, write_object

LARGE = bytes(range(256)) * (24 * 1024)


def use(storage: Storage, name: str) -> str:
    """Small and large objects, in parts and in ranges."""
    for content in (name.encode(), LARGE):
        write_object(storage, name, [content])
        if read_object(storage, name) != content:
            return "wrong bytes"
    return "right bytes" if name in [info.key for info in storage.list()] else "not listed"


def main(endpoint: str, client: str, storage_of: str) -> None:
    def open_one() -> Storage:
        return open_storage(
            f"s3://{BUCKET}",
            S3Server("given", endpoint).environment,
            options={"client": client, "range_bytes": "1MiB", "request_timeout_s": "10s"},
        )

    parents = open_one()
    if storage_of != "unused":
        use(parents, "before")
    if not (child := os.fork()):
        signal.alarm(20)  # it kills also what hangs in a library
        try:
            outcome = use(open_one() if storage_of == "own" else parents, "child")
        except UsageError as error:
            outcome = str(error)
        os.write(1, f"child: {outcome}\n".encode())
        os._exit(0)
    if storage_of != "unused":
        os.write(1, f"parent: {use(parents, 'parent')}\n".encode())
    os.waitpid(child, 0)


main(*sys.argv[1:])
