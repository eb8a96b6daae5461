"""Devices: what gradwire asks of a kind of device on which gradients may lie.

A device runs its work in the order of a stream, and later than the work was launched.
An event is a place in a stream: another stream, or the host, waits for it. The host is
no such device: it does its work at once, and needs no streams or events.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Stream = Any
"""A stream of a device."""
Event = Any
"""A place in a stream, with ``wait(stream)`` and, for the host, ``synchronize()``."""


class Accelerator:
    """A kind of device by its module in torch: CUDA, ROCm under the same name, XPU.

    CUDA's own network back end is NCCL.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that this thread launches on."""
        return self._module.current_stream(device)

    def new_stream(self, device: torch.device) -> Stream:
        """A stream that runs beside all others of the device."""
        return self._module.Stream(device)

    def record(self, stream: Stream) -> Event:
        """An event behind all that was launched on a stream so far."""
        return stream.record_event()

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """A block in which this thread launches on ``stream``."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def pinned(self, size_bytes: int) -> Tensor:
        """Host memory (uint8) that the device copies from and to by itself."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_capturing(self) -> bool:
        """Whether this thread's launches are recorded for later, as in a CUDA graph."""
        asked = getattr(self._module, "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    def network_name(self, device: torch.device) -> str | None:
        """The name that no other device has.

        None where it has no network back end of its own.
        """
        is_served = device.type == "cuda" and dist.is_nccl_available()
        return (
            str(self._module.get_device_properties(device).uuid) if is_served else None
        )

    def connect(
        self,
        device: torch.device,
        store: Any,
        rank: int,
        world: int,
        timeout: timedelta,
    ) -> Any:
        """A process group that sends from the device's own memory.

        Its works wait on streams.
        """
        # A group and not its back end alone: that has no way to launch sends and
        # receives together.
        group = dist.ProcessGroup(store, rank, world)
        kind = dist.ProcessGroup.BackendType.NCCL
        group._register_backend(device, kind, self.backend(store, rank, world, timeout))
        group._set_default_backend(kind)
        return group

    def backend(self, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
        """The back end of such a process group."""
        kind = torch._C._distributed_c10d.ProcessGroupNCCL
        options: Any = kind.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(range(world))
        return kind(store, rank, world, options)


def side_stream(device: torch.device) -> Stream:
    """The one stream of a device on which gradwire computes, for all models."""
    kind = kind_of(device)
    assert kind is not None, "the host has no streams"
    if device not in _SIDES:
        _SIDES[device] = kind.new_stream(device)
    return _SIDES[device]


@contextmanager
def kept_on(device: torch.device) -> Iterator[None]:
    """A block whose new tensors are a device's, and belong to its side stream.

    They may be given up while that stream uses them. The caller's stream goes on when
    they are made.
    """
    kind = kind_of(device)
    with device, ExitStack() as undo:
        if kind is not None:
            side = side_stream(device)
            current = kind.current_stream(device)
            undo.callback(lambda: kind.record(side).wait(current))
            undo.enter_context(kind.use(side))
        yield


HOST = torch.device("cpu")
_NEEDED = ("current_stream", "Stream", "stream")
_KINDS: dict[str, Accelerator | None] = {"cpu": None, "meta": None}
_SIDES: dict[torch.device, Stream] = {}


def kind_of(device: torch.device) -> Accelerator | None:
    """The functions of a device's kind.

    None where it has no streams, as the host has none.
    """
    if device.type not in _KINDS:
        module = torch.get_device_module(device)
        fits = all(hasattr(module, name) for name in _NEEDED)
        _KINDS[device.type] = Accelerator(module) if fits else None
    return _KINDS[device.type]


def home_of(tensors: Iterable[Tensor], *, host_only: bool) -> torch.device:
    """The device that encodes these parameters' gradients: theirs, if all have one.

    It is the host where that has no streams, and where an exchange is ``host_only``.
    """
    first, *others = {tensor.device for tensor in tensors}
    return HOST if host_only or others or kind_of(first) is None else first
