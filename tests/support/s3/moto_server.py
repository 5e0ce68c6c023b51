"""Moto's S3 server in a process of its own, on a free port, with its objects in memory.

Run as a module it is the server: it writes its port to standard output and ends when standard input does, so
that no server outlives the process that started it.
"""

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.s3.server import BUCKET, S3Server

from penstock.errors import Unavailable

START_LIMIT_S = 60.0
SPILL_BYTES = 1 << 40
"""Moto keeps what is larger than 5 MiB in temporary files, and so at the speed of a disk."""
ROOT = Path(__file__).parents[3]
"""From here `-m tests.support...` can be imported."""


@contextmanager
def running_moto() -> Iterator[S3Server]:
    """A moto server with the bucket `BUCKET`, for as long as the context lasts."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env={**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(SPILL_BYTES)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise Unavailable("moto's server did not start", fix="Run: pip install 'moto[s3,server]'")
        server = S3Server("moto", f"http://127.0.0.1:{port}")
        _make_bucket(server)
        yield server
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def _make_bucket(server: S3Server) -> None:
    """Moto asks nobody who they are, so an unsigned PUT makes a bucket."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=START_LIMIT_S)
        try:
            connection.request("PUT", f"/{BUCKET}", headers={"Host": "s3.amazonaws.com"})
            status = connection.getresponse().status
        except OSError:
            status = 503
        finally:
            connection.close()
        if status == 200:
            return
        if time.monotonic() > deadline_s:
            raise Unavailable(f"moto's server made no bucket: {status}", fix="Look at moto's release notes.")
        time.sleep(0.1)


def _serve() -> None:
    """Serve until standard input closes."""
    import threading

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        """Answers at once: with Nagle's algorithm each answer waits 40 ms for an acknowledgement."""

        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def log(self, *_args: object, **_kwargs: object) -> None:
            """Nothing."""

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
