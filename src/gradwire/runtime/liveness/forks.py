"""Forks: a child process has copies of handles and hooks, and none of the threads.

Its copies of connections are the parent's: whatever a child wrote there would end the
parent's job, and gloo's destructors wait for threads that a child does not have. So a
child refuses to exchange, and frees none of them. All this is done where Python forks
(``os.fork``, ``multiprocessing``), and costs nothing elsewhere.
"""

import ctypes
import os
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from ...errors import InvalidSetting

_connected: WeakSet[Any] = WeakSet()


def watch(connection: Any) -> None:
    """Has ``connection`` become a copy in each process that this one forks.

    Its method ``become_copy(error)`` makes it raise ``error`` wherever it is used from
    then on, and returns its process groups.
    """
    _connected.add(connection)


def _in_child() -> None:
    connections = list(_connected)
    if not connections:
        return
    _connected.clear()
    parent = os.getppid()
    process = os.getpid()
    error = InvalidSetting(
        f"process {process} was forked from process {parent}, which has attached this "
        "model: it has none of the connections to other ranks, so it cannot exchange "
        f"gradients; train in process {parent}, start this process by 'spawn', or call "
        f"handle.detach() here to train without an exchange (process {parent} stays "
        "attached)"
    )
    groups = [
        group for connection in connections for group in connection.become_copy(error)
    ]
    if dist.is_initialized():  # torch's own would keep the child from ending, too
        groups += dist.distributed_c10d._pg_map
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_in_child)
