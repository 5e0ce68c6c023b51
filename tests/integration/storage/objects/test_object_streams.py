"""How bytes move: few buffers for long streams, no copies where none are needed, endpoints in turns."""

import queue
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.support.s3.fake_bucket import FakeBucket
from tests.support.s3.fake_server import FakeServer, running_fake
from tests.support.s3.fault_plan import ALWAYS, Fault
from tests.support.s3.server import BUCKET

from penstock.errors import StorageError
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import read_object, write_object
from penstock.testing.storage_contract import arbitrary_bytes, assert_same_bytes

OpenCorner = Callable[..., Storage]
StartFaulty = Callable[..., FakeServer]

CLIENTS = ("obstore", "minio", "s3dlio", "s3torchconnector")
PART = 5 * 1024 * 1024
ROOT = Path(__file__).parents[4]
LIST_MANY = ("-m", "tests.integration.storage.objects.programs.list_many")

every_client = pytest.mark.parametrize("client", CLIENTS)


@every_client
def test_a_stream_far_larger_than_its_buffers_passes_through_them(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(Fault(action="delay", operation="UploadPart", seconds=0.01, times=ALWAYS))
    storage = corner(server.as_server(), client, parts_in_flight="2")
    free: queue.Queue[np.ndarray[tuple[int], np.dtype[np.uint8]]] = queue.Queue()
    for _ in range(3):
        free.put(np.empty(PART, np.uint8))
    sink = storage.create("stream")
    for number in range(12):
        buffer = free.get(timeout=30)
        buffer[:] = number
        sink.submit(buffer.data, lambda buffer=buffer: free.put(buffer))  # type: ignore[misc] # inferred well enough
    sink.finish()
    assert free.qsize() == 3
    stored = np.frombuffer(read_object(storage, "stream"), np.uint8).reshape(12, PART)
    assert (stored == np.arange(12, dtype=np.uint8)[:, None]).all()
    assert "objects-gather" not in storage.counters.copied_bytes


@every_client
def test_copies_are_counted_by_name_and_nothing_else_is_copied(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    storage = corner(faulty().as_server(), client)
    content = arbitrary_bytes(2 * PART)
    write_object(storage, "parts", [content], size_bytes=len(content))
    write_object(storage, "whole", [content[:1000]], size_bytes=1000)
    with closing(storage.open("parts")) as source:
        source.read_into(0, memoryview(bytearray(len(content))))
    expected = {
        "obstore": {"obstore-read": 2 * PART},
        "minio": {},
        "s3dlio": {"s3dlio-read": 2 * PART},
        "s3torchconnector": {
            "s3torchconnector-read": 2 * PART,
            "s3torchconnector-write": 2 * PART + 1000,
        },
    }
    assert dict(storage.counters.copied_bytes) == expected[client]


@every_client
def test_small_pieces_are_gathered_into_parts_and_the_copy_is_counted(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty()
    storage = corner(server.as_server(), client)
    content = arbitrary_bytes(PART + 70_000)
    write_object(
        storage, "pieces", [content[start : start + 40_000] for start in range(0, len(content), 40_000)]
    )
    assert server.requests["UploadPart"] == 2
    assert storage.counters.copied_bytes["objects-gather"] == len(content)
    assert_same_bytes(read_object(storage, "pieces"), content)


@pytest.mark.parametrize("client", ["obstore", "minio"])
def test_a_large_read_becomes_ranges_and_a_small_one_a_single_request(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty()
    storage = corner(server.as_server(), client, range_bytes="64KiB")
    content = arbitrary_bytes(300_000)
    write_object(storage, "ranges", [content])
    room = bytearray(200_000)
    with closing(storage.open("ranges")) as source:
        source.read_into(50_000, memoryview(room))
        assert server.requests["GetObject"] == 4
        source.read_into(0, memoryview(room)[:10])
        assert server.requests["GetObject"] == 5
    assert_same_bytes(room[10:], content[50_010:250_000])


@pytest.mark.parametrize("client", ["obstore", "minio", "s3torchconnector"])
def test_endpoints_take_turns_and_are_counted_each(client: str) -> None:
    bucket = FakeBucket()
    with running_fake(bucket=bucket) as first, running_fake(bucket=bucket) as second:
        storage = open_storage(
            f"s3://{BUCKET}/turns",
            first.as_server().environment,
            options={
                "client": client,
                "endpoints": f"{first.endpoint},{second.endpoint}",
                "part_bytes": "5MiB",
            },
        )
        for number in range(8):
            write_object(storage, str(number), [b"content"])
        write_object(storage, "large", [bytes(4 * PART)])
        assert_same_bytes(read_object(storage, "large"), bytes(4 * PART))
        counted = storage.counters.requests_by_endpoint
    assert set(counted) == {first.endpoint, second.endpoint}
    assert min(counted.values()) >= 8
    assert sum(first.requests.values()) >= 8
    assert sum(second.requests.values()) >= 8


def test_each_rank_begins_with_another_endpoint(faulty: StartFaulty) -> None:
    server = faulty()
    endpoints = f"{server.endpoint},http://127.0.0.1:9"
    for rank, reached in ((0, True), (1, False), (2, True)):
        storage = open_storage(
            f"s3://{BUCKET}",
            server.as_server().environment,
            options={"endpoints": endpoints, "attempts": "1"},
            rank=rank,
        )
        kind = "No object" if reached else "Cannot connect"
        with pytest.raises(StorageError, match=kind):
            storage.stat("absent")


def test_a_retry_goes_to_the_next_endpoint(faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty()
    storage = corner(
        server.as_server(), "minio", endpoints=f"http://127.0.0.1:9,{server.endpoint}", attempts="2"
    )
    write_object(storage, "reached", [b"content"])
    assert storage.counters.retries == 2
    assert storage.counters.requests_by_endpoint["http://127.0.0.1:9"] == 2


@pytest.mark.parametrize("client", ["obstore", "minio"])
@pytest.mark.parametrize("payload", ["signed", "unsigned"])
def test_the_payload_mode_is_used_and_recorded(
    client: str, payload: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty()
    storage = corner(server.as_server(), client, payload=payload)
    write_object(storage, "small", [b"content"])
    write_object(storage, "large", [bytes(2 * PART)])
    assert storage.options["payload"] == payload
    is_unsigned = set(server.payload_modes) == {"UNSIGNED-PAYLOAD"}
    assert is_unsigned == (payload == "unsigned")
    assert sum(server.payload_modes.values()) == 3


def test_virtual_hosts_are_used_when_paths_are_not(faulty: StartFaulty) -> None:
    server = faulty()
    storage = open_storage(
        f"s3://{BUCKET}",
        {
            **server.as_server().environment,
            "AWS_ENDPOINT_URL": server.endpoint.replace("127.0.0.1", "localhost"),
        },
        options={"path_style": "false", "attempts": "1", "request_timeout_s": "5s"},
    )
    with pytest.raises(StorageError) as caught:  # the fake knows paths alone, or the name does not resolve
        write_object(storage, "key", [b"content"])
    assert "localhost" in str(caught.value)


def test_an_object_that_outgrows_its_parts_is_refused_with_advice(
    faulty: StartFaulty, corner: OpenCorner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.objects.object_sink.MAX_PARTS", 2)
    server = faulty()
    sink = corner(server.as_server(), "obstore").create("endless")
    sink.submit(memoryview(bytes(2 * PART)))
    with pytest.raises(StorageError, match="outgrew 2 parts") as caught:
        sink.submit(memoryview(bytes(PART)))
    assert "Pass the size" in caught.value.fix
    sink.abort()
    assert server.bucket.open_uploads == []


def test_a_sink_that_is_over_takes_nothing_more(faulty: StartFaulty, corner: OpenCorner) -> None:
    sink = corner(faulty().as_server(), "obstore").create("over")
    sink.finish()
    with pytest.raises(StorageError, match="already finished or aborted"):
        sink.submit(memoryview(b"late"))
    with pytest.raises(StorageError, match="already finished or aborted"):
        sink.finish()


@pytest.mark.parametrize("client", ["minio", "s3torchconnector"])
def test_folder_markers_of_consoles_are_not_listed(client: str, faulty: StartFaulty) -> None:
    server = faulty()
    server.bucket.put("folder/", b"")
    server.bucket.put("folder/object", b"x")
    storage = open_storage(f"s3://{BUCKET}", server.as_server().environment, options={"client": client})
    assert [info.key for info in storage.list()] == ["folder/object"]


def _list_in_bounded_memory(client: str, num_keys: int) -> None:
    """The process stays below 150 MB; s3dlio imports torch, so with it only the growth can."""
    with running_fake(bucket=FakeBucket(virtual_keys=num_keys)) as server:
        done = subprocess.run(
            [sys.executable, *LIST_MANY, server.endpoint, client],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
            check=True,
        )
    listed, before_bytes, peak_bytes = map(int, done.stdout.split())
    assert listed == num_keys
    assert peak_bytes - before_bytes < 50e6
    assert client == "s3dlio" or peak_bytes < 150e6


@every_client
def test_thousands_of_keys_are_listed_in_bounded_memory(client: str) -> None:
    _list_in_bounded_memory(client, 20_000)


@pytest.mark.slow
@every_client
def test_hundreds_of_thousands_of_keys_are_listed_in_bounded_memory(client: str) -> None:
    _list_in_bounded_memory(client, 300_000)
