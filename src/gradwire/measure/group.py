"""The group that ranks measure in."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def launched_group(
    backend: str = "gloo", timeout: datetime.timedelta | None = None
) -> Iterator[None]:
    """Joins the group of torchrun's variables, and leaves it at the outermost end.

    Inside of another such block, or where the user's own code has joined already,
    nothing is done: a group that is joined a second time meets what the first one left
    in its store.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
