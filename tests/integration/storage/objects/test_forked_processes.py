"""Storages on objects in a forked process: they work there, or say at once that they cannot."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.s3.fake_server import FakeServer

StartFaulty = Callable[..., FakeServer]


def _fork(server: FakeServer, client: str, storage_of: str) -> list[str]:
    program = "tests.integration.storage.objects.programs.fork_and_use"
    done = subprocess.run(
        [sys.executable, "-m", program, server.endpoint, client, storage_of],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("storage_of", ["parent", "own"])
@pytest.mark.parametrize("client", ["minio", "s3torchconnector"])
def test_a_fork_of_a_process_that_used_objects_uses_them_too(
    client: str, storage_of: str, faulty: StartFaulty
) -> None:
    assert _fork(faulty(), client, storage_of) == ["child: right bytes", "parent: right bytes"]


@pytest.mark.parametrize("storage_of", ["parent", "own"])
@pytest.mark.parametrize("client", ["obstore", "s3dlio"])
def test_a_fork_is_told_that_the_threads_of_its_client_are_not_there(
    client: str, storage_of: str, faulty: StartFaulty
) -> None:
    told, parent = _fork(faulty(), client, storage_of)
    assert told.startswith(f"child: The client {client} cannot work in a forked process: ")
    assert "'spawn'" in told
    assert parent == "parent: right bytes"


@pytest.mark.parametrize("client", ["obstore", "minio", "s3dlio", "s3torchconnector"])
def test_a_fork_uses_a_storage_that_was_only_opened_before(client: str, faulty: StartFaulty) -> None:
    assert _fork(faulty(), client, "unused") == ["child: right bytes"]
