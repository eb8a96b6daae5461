"""The fork server of ranks, which all workers of one run of tests share.

It imports torch once, which takes seconds; each rank is forked from it in milliseconds.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

# Connections that break on purpose would fill pages with C++ stacks.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

PRELOADED = [
    *("pytest", "torch", "torch._dynamo", "gradwire.runtime.attach"),
    *("tests.runtime.ranks", "tests.runtime.training", "tests.runtime.meshes"),
    *("tests.runtime.plans", "gradwire.runtime.survive.rejoin"),
    *("gradwire.runtime.survive.shrink", "gradwire.runtime.state.joint_call"),
    "torch._dynamo.repro.after_dynamo",
]
"""What every rank would import otherwise; torch loads _dynamo at the first optimizer,
in 1.5 s, and what is named last at the first ``torch.compile``.
"""


def started() -> list[Any]:
    """Starts the server if it does not run; returns what ``share`` takes elsewhere."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    own: Any = forkserver._forkserver
    # Python 3.14 has clients prove that they know a key.
    key = getattr(own, "_forkserver_authkey", None)
    return [own._forkserver_address, key]


def share(given: list[Any]) -> None:
    """Has this process fork from a server that another process has ``started``."""
    own: Any = forkserver._forkserver
    own._forkserver_address, own._forkserver_authkey = given
    # Each rank is handed a descriptor; that which keeps the server is the starter's.
    own._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    own.ensure_running = resource_tracker.ensure_running
