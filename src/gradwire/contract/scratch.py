"""Passing buffers: memory that serves within one computation and is free again at its end.

A thread does one computation at a time. So buffers that no computation leaves anything in are kept
once a thread, and not once a message: all messages of a compute lane use the same ones.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor


class _Own:
    """The passing buffers of one thread, by name, dtype and device; they end with the thread."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


class _Threads(threading.local):
    def __init__(self) -> None:
        self.own = _Own()
        with _lock:
            _all.add(self.own)


_lock = threading.Lock()
_all: weakref.WeakSet[_Own] = weakref.WeakSet()
_threads = _Threads()


def passing(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of ``numel`` undefined elements, valid until this thread's computation ends.

    Within one computation every use has another name. A buffer only grows, by an eighth more than
    is needed. What is never written of it takes no memory of a CPU.
    """
    own = _threads.own.found
    found = own.get((name, dtype, device))
    if found is None or found.numel() < numel:
        room = numel if found is None else numel + numel // 8
        with torch.inference_mode(False):  # it may be written outside of that next time
            found = own[name, dtype, device] = torch.empty(room, dtype=dtype, device=device)
    return found[:numel]


def passing_bytes(*, own: bool = False) -> int:
    """Bytes of all passing buffers in this process, or of the calling thread's ``own``."""
    kept = [_threads.own]
    if not own:
        with _lock:
            kept = list(_all)
    found = [tensor for one in kept for tensor in list(one.found.values())]
    return sum(tensor.nbytes for tensor in found if not tensor.is_meta)
