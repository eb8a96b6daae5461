"""Files that ranks run as a launcher starts them, in processes that have imported torch
already.
"""

from __future__ import annotations

import io
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist

from tests.runtime.ranks import Ranks


def run_by(
    world: int, path: Path, arguments: Sequence[str] = (), launcher: str = "torch"
) -> str:
    """What rank 0 prints of a file that finds the variables of torchrun, or of srun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = Ranks(world)
    try:
        first, *_ = ranks.run(_run_file, str(path), tuple(arguments), port, launcher)
    finally:
        ranks.close()
    return str(first)


def _run_file(
    rank: int, world: int, path: str, arguments: Sequence[str], port: str, launcher: str
) -> str:
    dist.destroy_process_group()  # the file joins one itself
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    names = (
        ("SLURM_PROCID", "SLURM_NTASKS")
        if launcher == "slurm"
        else ("RANK", "WORLD_SIZE")
    )
    os.environ.update(zip(names, (str(rank), str(world)), strict=True))
    sys.argv = [path, *arguments]
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()
