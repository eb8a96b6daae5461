"""Row-sparse gradients, as ``nn.Embedding(sparse=True)`` makes them: averaged without loss.

Source: what DDP does with sparse gradients (all-gather of indices and values).
Differences: row counts are gathered first and rows padded to the largest count, so every rank may
    have touched another number of rows, or none.
Wire: 8 bytes, then (W-1) * max rows * (8 + row bytes) a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Member
from ._verbs import AllGather, Compute, Steps


def average_rows(me: Member, rows_R: Tensor, values_RC: Tensor) -> Steps[tuple[Tensor, Tensor]]:
    """Averages rows over ranks: returns (row numbers ascending, their mean values).

    ``rows_R`` int64, without duplicates; ``values_RC`` their rows. Ranks may differ in R, not in C.
    """
    counts_W = torch.zeros(me.world, dtype=torch.int64)
    yield AllGather(counts_W, torch.tensor([rows_R.numel()]))
    counts = counts_W.tolist()
    width, most = values_RC.shape[1], max(counts)
    if most == 0:
        return rows_R, values_RC
    own_rows = torch.zeros(most, dtype=torch.int64)
    own_values = torch.zeros(most * width, dtype=values_RC.dtype)
    own_rows[: rows_R.numel()] = rows_R
    own_values[: values_RC.numel()] = values_RC.reshape(-1)
    all_rows = torch.empty(me.world * most, dtype=torch.int64)
    all_values = torch.empty(me.world * most * width, dtype=values_RC.dtype)
    yield AllGather(all_rows, own_rows)
    yield AllGather(all_values, own_values)

    def merge() -> tuple[Tensor, Tensor]:
        parts = [slice(r * most, r * most + n) for r, n in enumerate(counts)]
        rows = torch.cat([all_rows[part] for part in parts])
        values = torch.cat([all_values.view(-1, width)[part] for part in parts])
        union, place = torch.unique(rows, return_inverse=True)
        mean = torch.zeros(union.numel(), width, dtype=values.dtype)
        return union, mean.index_add_(0, place, values).mul_(1 / me.world)

    merged: tuple[Tensor, Tensor] = yield Compute("merge", merge, me.world * most * width)
    return merged
