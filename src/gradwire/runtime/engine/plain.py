"""Plain: ranks give each other tensors, numbers and text, never pickles.

Whoever reaches a rank's ports could send it bytes. ``torch.load(weights_only=True)``
makes tensors and plain containers of them, or refuses, and so does the sender before
anybody waits for the bytes.
"""

import io
import mmap
import re
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...contract.verbs import Broadcast, Recv, Send, Steps
from ...errors import InvalidSetting
from ..transport.wire import Channel, Group, carry_out
from .engine import CONTROL, Engine

_PART_BYTES = 2**25
"""Bytes that travel at once to another rank."""


def packed(given: Any) -> Tensor:
    """The bytes of tensors, numbers, text, and of lists, tuples and dicts of these.

    Raises ``InvalidSetting`` for anything else, which no other rank would take.
    """
    file = io.BytesIO()
    try:
        torch.save(_without_numpy(given), file)
        file.seek(0)
        torch.load(file, "meta", weights_only=True)  # reads no elements
    except Exception as error:  # whatever pickle raises for an object of the user's
        kind = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds a {kind[1]}" if kind else str(error).partition("\n")[0]
        raise InvalidSetting(
            f"a state cannot be sent to other ranks: {what}; tensors, numbers, "
            "text, lists and "
            "dicts travel, so keep other objects out of the optimizer's state_dict()"
        ) from error
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _without_numpy(given: Any) -> Any:
    """The same with numbers and tensors in place of numpy's.

    Schedules may make numpy's.
    """
    if isinstance(given, np.generic):
        return given.item()
    if isinstance(given, np.ndarray) and given.dtype != object:
        return torch.from_numpy(given)
    if isinstance(given, dict):
        return {
            _without_numpy(key): _without_numpy(value) for key, value in given.items()
        }
    if type(given) in (list, tuple):
        return type(given)(map(_without_numpy, given))
    return given


def read_packed(data: Any) -> Any:
    """The value that another rank has ``packed``, in host memory.

    ``data`` is a file or a map.
    """
    return torch.load(data, map_location="cpu", weights_only=True)


def send(data: Tensor, dst: int, channel: Channel) -> None:
    """Sends bytes to another rank, in parts.

    Each part may take as long as a message.
    """
    for part in (torch.tensor([data.numel()]), *torch.split(data, _PART_BYTES)):
        carry_out([Send(dst, part)], [channel])


def receive(src: int, channel: Channel) -> mmap.mmap:
    """The bytes that another rank sends, at least one."""
    carry_out([Recv(src, size := torch.zeros(1, dtype=torch.int64))], [channel])
    # Pages that come as they are written, and a file: neither zeros nor another copy,
    # for which the pulse would have to wait.
    data: Any = mmap.mmap(-1, int(size))
    for part in torch.split(torch.frombuffer(data, dtype=torch.uint8), _PART_BYTES):
        carry_out([Recv(src, part)], [channel])
    return data  # type: ignore[no-any-return]


def announced_by(engine: Engine, src: int, own: Any) -> Any:
    """The value of rank ``src``, which it announces to all others.

    None of the model's is under way.

    A value is as for ``packed``. If rank ``src`` cannot pack it, all raise.
    """
    data = torch.empty(0, dtype=torch.uint8, device="cpu")
    failure = None
    if engine.rank == src:
        data, failure = _packed_if_possible(own)

    def steps() -> Steps[Tensor]:
        size = torch.tensor([data.numel()], device="cpu")
        yield Broadcast(src, size)
        whole = data if engine.rank == src else data.new_zeros(int(size))
        if size:
            yield Broadcast(src, whole)
        return whole

    end = engine.launch(0, "state", steps(), CONTROL)
    engine.wait([end])
    if not end.result.numel():
        raise failure or InvalidSetting(
            f"rank {src} cannot send its state; see the error of that rank"
        )
    return unpacked(end.result)


def _packed_if_possible(own: Any) -> tuple[Tensor, InvalidSetting | None]:
    """A value's bytes; where it cannot be packed, none, and the error.

    The error is raised once the others, who wait for the size, know.
    """
    try:
        return packed(own), None
    except InvalidSetting as error:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), error


def unpacked(data: Tensor) -> Any:
    """The value of which these are the bytes."""
    return read_packed(io.BytesIO(data.cpu().numpy().tobytes()))


def values_of_all(own: Any, group: Group | None = None) -> list[Any]:
    """Every rank's value in rank order.

    All ranks of a group of torch.distributed call it.

    A value is as for ``packed``. A rank that cannot pack its own raises on all.
    """
    device = dist.distributed_c10d._get_object_coll_device(group)
    world = dist.get_world_size(group)
    data, failure = _packed_if_possible(own)
    data = data.to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group)
    counts = [int(size) for size in sizes]
    if failure is not None:
        raise failure
    if 0 in counts:
        raise InvalidSetting(
            f"rank {counts.index(0)} of the group cannot send its state; see the "
            "error of that rank"
        )
    padded = data.new_zeros(max(counts))
    padded[: data.numel()] = data
    found = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(found, padded, group)
    announced = zip(found, counts, strict=True)
    return [unpacked(one[:count]) for one, count in announced]
