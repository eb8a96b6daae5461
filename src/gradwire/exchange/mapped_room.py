"""Rooms: memory that a rank writes, and other ranks of its host can read.

A room is an anonymous file in memory (``memfd_create``), which each rank maps. It has
no name in a file system: the kernel frees it with the last process that has mapped it.
No limit of ``/dev/shm`` applies. Its pages are reserved when it is made, so writing
never fails later.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from secrets import randbits
from weakref import finalize

import torch
from torch import Tensor

from ..contract.verbs import Room

Whereabouts = tuple[int, int, int, int]
"""A process, its file descriptor, bytes and a number that no other room has.

Zeros for no news.
"""
_NO_NEWS: Whereabouts = (0, 0, 0, 0)


class MappedRoom(Room):
    """``numel`` undefined elements of host memory that other processes can map.

    ``is_open`` is False where this system makes no such memory, or one of the ranks
    could not map it.
    """

    def __init__(self, numel: int, like: Tensor, dtype: torch.dtype) -> None:
        self.parts = None
        self.is_open = True
        self.own_M = torch.empty(0, dtype=dtype)
        self._announced = _NO_NEWS
        self.why = ""
        size_bytes = max(1, numel) * dtype.itemsize
        number = randbits(63)
        try:
            if not like.is_cpu:
                raise OSError(f"other processes cannot map memory of {like.device}")
            fd = os.memfd_create(_name_of(number))
            self._close = finalize(self, os.close, fd)
            os.posix_fallocate(fd, 0, size_bytes)
            whole = _mapped(_path_of(os.getpid(), fd), size_bytes)
            self.own_M = whole.view(dtype)[:numel]
            self._announced = (os.getpid(), fd, size_bytes, number)
        # Only Linux has memfd_create.
        except (OSError, AttributeError, RuntimeError) as error:
            self.why = str(error)
            self.settle(is_lent=False)

    def announce(self) -> Whereabouts:
        announced = self._announced
        self._announced = _NO_NEWS
        return announced

    def map(self, announced: Sequence[Sequence[int]], rank: int) -> bool:
        """Maps the rooms that all ranks of the host have ``announced``.

        Only the file that was announced is opened. In another container its numbers may
        stand for another file.
        """
        parts = []
        try:
            for place, (process, fd, size_bytes, number) in enumerate(announced):
                path = _path_of(process, fd)
                if not size_bytes or _name_of(number) not in path.readlink().name:
                    raise OSError(
                        f"rank {place} of the host has no memory that this one can map"
                    )
                if place == rank:
                    parts.append(self.own_M)
                    continue
                parts.append(_mapped(path, size_bytes).view(self.own_M.dtype))
        except (OSError, RuntimeError) as error:
            self.why = str(error)
            return False
        self.parts = parts
        return True

    def settle(self, *, is_lent: bool) -> None:
        """Notes the agreement of the host's ranks: all map all rooms, or none.

        Mapped memory stays, and the file is not opened again.
        """
        if not is_lent:
            self.parts = None
            self.is_open = False
            self.own_M = self.own_M[:0].clone()
        if hasattr(self, "_close"):
            self._close()


def _name_of(number: int) -> str:
    return f"gradwire-{number:x}"


def _path_of(process: int, fd: int) -> Path:
    return Path(f"/proc/{process}/fd/{fd}")


def _mapped(path: Path, size_bytes: int) -> Tensor:
    # Python's mmap would keep a file open for each map.
    return torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)
