"""Scratch of a thread: buffers that are free again at the end of a computation.

A thread does one computation at a time, so they are kept once a thread, and not once a
message: all messages that a thread computes use the same ones.
"""

import threading
import weakref

import torch
from torch import Tensor


class _Buffers:
    """The scratch of one thread, which end with it."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


class _Threads(threading.local):
    def __init__(self) -> None:
        self.buffers = _Buffers()
        with _lock:
            _every.add(self.buffers)


_lock = threading.Lock()
_every: weakref.WeakSet[_Buffers] = weakref.WeakSet()
_threads = _Threads()


def thread_scratch(
    name: str, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A vector of ``numel`` undefined elements for this thread's computation.

    It is valid until the computation ends.

    Within one computation every use has another name. A buffer only grows, by an eighth
    more than is needed. What is never written of it takes no memory of a CPU.
    """
    by_key = _threads.buffers.by_key
    key = (name, dtype, device)
    buffer = by_key.get(key)
    if buffer is None or buffer.numel() < numel:
        length = numel if buffer is None else numel + numel // 8
        # It may be written outside of inference mode next time.
        with torch.inference_mode(False):
            buffer = torch.empty(length, dtype=dtype, device=device)
        by_key[key] = buffer
    return buffer[:numel]


def thread_scratch_bytes(*, own: bool = False) -> int:
    """Bytes of all threads' scratch in this process, or of this thread's ``own``."""
    threads = [_threads.buffers]
    if not own:
        with _lock:
            threads = list(_every)
    tensors = [tensor for thread in threads for tensor in list(thread.by_key.values())]
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)
