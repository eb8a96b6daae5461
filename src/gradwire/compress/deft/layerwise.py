"""The largest elements of each of some layers: DEFT, algorithm 5.

Source: Yoon and Oh, ICPP 2023, section 4.4.
Differences from the paper: exact, with ties to the lowest index, and listed by ascending index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract import Member
from ...kernels import select
from .layer_partition import Partition


def select_layers(
    me: Member,
    whole_N: Tensor,
    partition: Partition,
    layers_P: Tensor,
    ks_P: Tensor,
    firsts_P: Tensor | None = None,
) -> Tensor:
    """Indices (int32) of the ``ks_P`` largest by magnitude of each of the layers ``layers_P``.

    All int64, layers in ascending order: so are the indices. A layer's first element counts as
    ``firsts_P``, None: as where it lies in the gradient. They lie in a buffer of the member.
    """
    count = int(ks_P.sum())
    indices_K = me.scratch("own indices", count, whole_N, torch.int32, varies=True)
    values_K = me.scratch("own values", count, whole_N, whole_N.dtype, varies=True)
    starts_P, stops_P = partition.starts_L[layers_P], partition.stops_L[layers_P]
    select.topk_ranges(whole_N, starts_P, stops_P, ks_P, indices_K, values_K, firsts_P)
    return indices_K
