"""Sweeping: gives back the keys of an attach in the job's store, and its memory.

The store keeps whatever is written to it until the job ends. What one attach writes
begins with the attach's name: signs of life, notes by which ranks agree, the addresses
of its channels and probe ports.
"""

import contextlib
import ctypes
from concurrent.futures import wait
from typing import Any

from ..transport.wire import in_background, own_store

_LEAVING_S = 4.0


def sweep(store: Any) -> None:
    """Deletes all keys of a ``PrefixStore``.

    Neither an older torch nor a store that is written in Python can list keys: none is
    deleted.
    """
    with contextlib.suppress(AttributeError, NotImplementedError):
        for key in store.list_keys():
            store.delete_key(key)


def leave(store: Any, world: int) -> None:
    """Notes that one of ``world`` ranks is done with a store.

    The last one sweeps it.
    """
    if store.add("left", 1) == world:
        sweep(store)


def leave_soon(name: str, world: int) -> None:
    """Leaves the store under a name; waits for a silent store for some seconds.

    A thread that asks a store as the interpreter ends would abort the process.
    """
    wait([in_background(lambda: leave(own_store(name), world))], _LEAVING_S)


def give_memory_back() -> None:
    """Returns freed memory to the system.

    Lanes and channels are threads, and glibc has each take memory from a place of its
    own, which it keeps. Without this call 100 attaches of a model of 2.5 MB kept 40 MB.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
