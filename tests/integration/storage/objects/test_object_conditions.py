"""Conditional writes: the service decides, and the second of two writers is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.support.s3.fault_plan import Fault

from penstock.errors import AccessRefused, AlreadyThere, ObjectNotFound
from penstock.storage.capabilities import require_conditional_writes
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.objects.object_storage import ObjectStorage
from penstock.storage.protocol import read_object

if TYPE_CHECKING:
    from tests.support.s3.fake_server import FakeServer

    from penstock.storage import Storage

ABSENT_TAG = "0123456789abcdef0123456789abcdef"

OpenCorner = Callable[..., "Storage"]


@pytest.fixture(params=["memory", "lasting_fake", "moto", "radosgw"])
def storage(request: pytest.FixtureRequest, corner: OpenCorner) -> Storage:
    """Each storage that can write on conditions."""
    if request.param == "memory":
        return MemoryStorage()
    server = request.getfixturevalue(request.param)
    return corner(server.as_server() if request.param == "lasting_fake" else server, "obstore")


def test_only_the_first_of_two_writers_makes_an_object(storage: Storage) -> None:
    writer = require_conditional_writes(storage)
    info = writer.write_if("key", b"first", replaces=None)
    assert (info.key, info.size_bytes) == ("key", 5)
    assert info.checksum == storage.stat("key").checksum
    with pytest.raises(AlreadyThere):
        writer.write_if("key", b"second", replaces=None)
    assert read_object(storage, "key") == b"first"


def test_an_object_is_replaced_only_as_it_was_when_it_was_read(storage: Storage) -> None:
    writer = require_conditional_writes(storage)
    first = writer.write_if("key", b"first", replaces=None).checksum
    second = writer.write_if("key", b"second", replaces=first).checksum
    for stale in (first, ABSENT_TAG):
        with pytest.raises(AlreadyThere):
            writer.write_if("key", b"third", replaces=stale)
    assert read_object(storage, "key") == b"second"
    storage.delete("key")
    with pytest.raises(AlreadyThere):
        writer.write_if("key", b"third", replaces=second)
    with pytest.raises(ObjectNotFound):
        storage.stat("key")


@pytest.mark.parametrize("client", ["minio", "s3torchconnector"])
def test_a_client_without_conditional_writes_is_refused_early(
    lasting_fake: FakeServer, corner: OpenCorner, client: str
) -> None:
    pytest.importorskip("minio" if client == "minio" else "s3torchconnectorclient")
    storage = corner(lasting_fake.as_server(), client)
    assert isinstance(storage, ObjectStorage)
    assert not storage.has_conditions


def test_a_refused_write_is_not_a_lost_race(faulty: Callable[..., FakeServer], corner: OpenCorner) -> None:
    server = faulty(Fault(action="refuse", operation="PutObject", status=403, code="AccessDenied"))
    storage = corner(server.as_server(), "obstore")
    with pytest.raises(AccessRefused):
        require_conditional_writes(storage).write_if("key", b"x", replaces=None)
