"""Device streams with simulated devices: order of streams and events, late copies, pinned memory."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import xxhash

from penstock.checkpoint.file_layout import (
    DeviceStream,
    DeviceStreams,
    FileItem,
    FileLayout,
    LayoutFiller,
    TorchPayload,
    open_device_streams,
    payload_of_tensor,
)
from penstock.checkpoint.saver import copy_to_host
from penstock.storage.aligned import PAGE_BYTES, address_of
from penstock.transfer.buffers import WarmMemory, pin_memory
from penstock.transfer.pipeline import PlannedObject

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")


@dataclass
class _Stream:
    name: str
    log: list[str]

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"{self.name} awaited")


@dataclass
class _Event:
    log: list[str]

    def record(self, stream: _Stream) -> None:
        self.log.append(f"event in {stream.name}")

    def synchronize(self) -> None:
        self.log.append("event awaited")


@dataclass
class _Module:
    """What torch.cuda offers, noting who is asked for what in which order."""

    log: list[str] = field(default_factory=list)

    def Stream(self, device: torch.device) -> _Stream:  # noqa: N802 - torch's name
        return _Stream(f"side stream of {device}", self.log)

    def Event(self, *, blocking: bool) -> _Event:  # noqa: N802 - torch's name
        assert blocking
        return _Event(self.log)

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream(f"caller's stream of {device}", self.log)

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self.log.append(f"into {stream.name}")
        yield
        self.log.append(f"out of {stream.name}")


class _LateLink:
    """Copies at the last moment."""

    def __init__(self) -> None:
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_fetched = 0

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._begun.append((target, source))
        self.num_fetched += 1

    def catch_up(self) -> None:
        for target, source in self._begun:
            target.copy_(source)
        self._begun.clear()


def test_copies_wait_on_the_device_and_end_with_an_event() -> None:
    module = _Module()
    link = DeviceStream(CPU, module)
    target = torch.zeros(4)
    link.fetch(target, torch.arange(4.0))
    link.catch_up()
    assert module.log == [
        "side stream of cpu waits for caller's stream of cpu",
        "into side stream of cpu",
        "out of side stream of cpu",
        "event in side stream of cpu",
        "event awaited",
    ]
    assert target.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("settled_last", [True, False])
def test_late_device_copies_are_written_and_checksummed(*, settled_last: bool) -> None:
    tensor = torch.randn(3, 5000).t()
    before = tensor.to(torch.bfloat16).reshape(-1)
    link = _LateLink()
    links: DeviceStreams = {CPU: cast("DeviceStream", link)}
    layout = FileLayout("file", (FileItem(0, b"prefix", tensor.numel() * 2, b"suffix"),))
    planned = PlannedObject("file", layout.size_bytes)
    filler = LayoutFiller(
        [layout],
        {"file": [TorchPayload(tensor, torch.bfloat16)]},
        device_streams=links,
        sums_hot=True,
    )
    content = bytearray(layout.size_bytes)
    ranges = [(at, memoryview(content)[at : at + 8192]) for at in range(0, layout.size_bytes, 8192)]
    for at, view in ranges:
        filler.fill(planned, at, view)
        if not settled_last:
            filler.settle(planned, at, view)
    if settled_last:
        filler.catch_up()
        tensor.fill_(7)
        for at, view in ranges:
            filler.settle(planned, at, view)
    assert link.num_fetched >= len(ranges)
    assert filler.sums("file") == xxhash.xxh3_128_digest(bytes(content))
    saved = torch.frombuffer(content[6:-6], dtype=torch.bfloat16)
    assert saved.equal(before)


class _OnDevice(TorchPayload):
    """A tensor that another device is said to have."""

    def __init__(self, memory: torch.Tensor, device: str = "cuda:0") -> None:
        super().__init__(memory, memory.dtype)
        self.device = torch.device(device)

    def copy_into(self, start: int, target: memoryview, stream: DeviceStream | None = None) -> None:
        assert stream is not None
        super().copy_into(start, target, stream)


def test_each_device_has_one_stream_or_is_synchronized() -> None:
    module = _Module()
    names = ("cuda:0", "cuda:1", "cuda:0", "xpu:0")
    payloads = [_OnDevice(torch.zeros(1), name) for name in names]
    links = open_device_streams(payloads, lambda _: module)
    assert list(links) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert module.log.count("caller's stream of xpu:0 awaited") == 1
    assert "side stream of cuda:1 waits for caller's stream of cuda:1" in module.log
    for link in links.values():
        link.catch_up()
    assert module.log.count("event awaited") == 2


def test_tensors_are_copied_to_pinned_memory_in_side_streams_that_are_awaited_once() -> None:
    module, memory = _Module(), WarmMemory(4 * PAGE_BYTES, is_shared=True)
    memory.is_pinned = True
    tensors = [torch.arange(1500.0), torch.randn(0), torch.randn(3, 5).t(), torch.arange(9)]
    payloads = [
        _OnDevice(tensors[0]),
        _OnDevice(tensors[1]),
        payload_of_tensor(tensors[2]),
        _OnDevice(tensors[3]),
    ]
    links = open_device_streams(payloads, lambda _: module)
    views = copy_to_host(payloads, [tensor.nbytes for tensor in tensors], memory, links)
    assert [address_of(view) % PAGE_BYTES for view in views if view] == [0, 0, 0]
    for tensor, view in zip(tensors, views, strict=True):
        assert bytes(view) == tensor.contiguous().numpy().tobytes()
    assert module.log[0] == "side stream of cuda:0 waits for caller's stream of cuda:0"
    assert module.log.count("event awaited") == 1
    assert module.log[-1] == "event awaited"


def test_tensors_in_host_memory_need_no_device_stream() -> None:
    def no_module(device: torch.device) -> Any:
        raise AssertionError(device)

    payloads = [payload_of_tensor(torch.zeros(4)), payload_of_tensor(torch.zeros(4), torch.half)]
    assert open_device_streams(payloads, no_module) == {}


@dataclass
class _Registrar:
    error: int = 0
    registered: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:  # noqa: N802 - CUDA's name
        assert flags == 0
        if not self.error:
            assert address not in self.registered
            self.registered[address] = size_bytes
        return self.error

    def cudaHostUnregister(self, address: int, /) -> int:  # noqa: N802 - CUDA's name
        del self.registered[address]
        return 0


def test_memory_is_pinned_once_and_unpinned_before_it_is_freed() -> None:
    registrar, memory = _Registrar(), WarmMemory(1 << 20)
    address = address_of(memory.view)
    assert pin_memory(memory, registrar)
    assert pin_memory(memory, registrar)
    assert registrar.registered == {address: 1 << 20}
    del memory
    gc.collect()
    assert registrar.registered == {}


def test_memory_that_cannot_be_pinned_is_used_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = WarmMemory(1 << 20)
    assert not pin_memory(memory, _Registrar(error=2))
    assert not memory.is_pinned
    assert "CUDA error 2" in caplog.text
    assert "ulimit -l" in caplog.text
