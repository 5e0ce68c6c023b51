"""Links to accelerators: copies out of their memory in streams of our own, begun without waiting for them.

Between `payloads`, which say what is copied, and `filling`, which says where to and waits. Invariant: a copy
sees what the caller's stream had been asked to do when the link was made, and nothing that it is asked for
after `catch_up` has returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.checkpoint.pinning import pin
from penstock.checkpoint.staging.payloads import SupportsFetching

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.checkpoint.pipe.memory import WarmMemory
    from penstock.checkpoint.staging.payloads import Payload

LINKED = "cuda"
"""The kind of devices that copy by themselves here, AMD's among them."""
AWAITED = "xpu"
"""The kind whose work is waited for, as threads copy in streams of their own. Others have no streams."""


class DeviceModule(Protocol):
    """What is asked of `torch.cuda`, and of torch's modules of other devices."""

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - torch's name
        """A stream of our own."""

    def Event(self, *, blocking: bool) -> Any:  # noqa: N802 - torch's name
        """What can be waited for."""

    def current_stream(self, device: torch.device) -> Any:
        """The stream that the calling thread works in."""

    def stream(self, stream: Any) -> Any:
        """A context in which the thread works in another stream."""


class Link:
    """A side stream of one device. Made in the caller's thread; any thread may fetch through it."""

    def __init__(self, device: torch.device, module: DeviceModule) -> None:
        self._module = module
        self._stream = module.Stream(device)
        # The device waits, not this thread: what it was asked for may take as long as a step of training.
        self._stream.wait_stream(module.current_stream(device))

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy, converting to the target's dtype on the device. Both stay alive until `catch_up`."""
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def catch_up(self) -> None:
        """Return when all copies that were begun are done."""
        # A blocking event lets this thread sleep, as others have bytes to sum and to write.
        event = self._module.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()


@dataclass(frozen=True, slots=True)
class Links:
    """Those of one save."""

    by_device: Mapping[torch.device, Link]

    def catch_up(self) -> None:
        """Return when all copies that were begun are done."""
        for link in self.by_device.values():
            link.catch_up()

    def pin(self, memory: WarmMemory) -> None:
        """Have devices copy straight to `memory`, where there are any."""
        if self.by_device:
            pin(memory)


def links_to(
    payloads: Mapping[str, Sequence[Payload]],
    module_of: Callable[[torch.device], DeviceModule] = torch.get_device_module,
) -> Links:
    """A link to each device that payloads lie on. Called in the thread after whose work they are taken."""
    devices = {
        payload.device: None
        for of_file in payloads.values()
        for payload in of_file
        if isinstance(payload, SupportsFetching)
    }
    for device in devices:
        if device.type == AWAITED:
            module_of(device).current_stream(device).synchronize()
    return Links({device: Link(device, module_of(device)) for device in devices if device.type == LINKED})
