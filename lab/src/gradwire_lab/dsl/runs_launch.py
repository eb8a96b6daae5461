"""Coders of runs on a GPU: a program codes a block, so what a run needs of others stays
in it.

The definition, and what is on the wire, is ``coders.py``. Of a gradient's coded bytes
nothing but their number, and whether they are a code, comes to the host: one copy each.

Legend: U plain bytes, C coded ones, B blocks.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

_TILE = 1024


def encode_runs(
    plain_U: Tensor, block_bytes: int, single: Tensor, run: Tensor, of: int, most: int
) -> tuple[Tensor, Tensor]:
    """(lengths_B int64, coded_C uint8) of blocks of so many bytes.

    ``single`` and ``run`` (int64, on the same device) are the codes of bytes and of
    runs by length.
    """
    num_blocks = -(-plain_U.numel() // block_bytes)
    lengths_B = torch.zeros(num_blocks, dtype=torch.int64, device=plain_U.device)
    coded_C = torch.empty_like(plain_U)
    if not num_blocks:
        return lengths_B, coded_C
    operands = (plain_U, plain_U.numel(), block_bytes, single, run)
    fixed: dict[str, Any] = {"OF": of, "MOST": most, "TILE": _TILE}
    kernels = _device()
    kernels.count_runs[(num_blocks,)](*operands, lengths_B, **fixed)
    ends_B = lengths_B.cumsum(0)
    kernels.write_runs[(num_blocks,)](*operands, ends_B - lengths_B, coded_C, **fixed)
    return lengths_B, coded_C[: int(ends_B[-1])]


def decode_runs(
    lengths_B: Tensor,
    coded_C: Tensor,
    plain_U: Tensor,
    block_bytes: int,
    byte: Tensor,
    times: Tensor,
    of: int,
) -> int:
    """Fills ``plain_U``; returns the first block that these are no code of, or -1.

    ``byte`` and ``times`` (int64, on the same device) are what each code stands for.
    Lengths are 0 to a block's own and add up to those of ``coded_C``; of its bytes
    nothing is trusted.
    """
    if not lengths_B.numel():
        return -1
    wrong_B = torch.empty_like(lengths_B)
    plain_U.fill_(of)
    _device().read_runs[(lengths_B.numel(),)](
        coded_C,
        lengths_B,
        lengths_B.cumsum(0) - lengths_B,
        plain_U,
        plain_U.numel(),
        block_bytes,
        byte,
        times,
        wrong_B,
        OF=of,
        TILE=_TILE,
    )
    wrong, first = torch.stack([wrong_B.max(), wrong_B.argmax()]).tolist()
    return int(first) if wrong else -1


@cache
def _device() -> Any:
    """The kernels; importing them needs triton."""
    from . import runs_device

    return runs_device
