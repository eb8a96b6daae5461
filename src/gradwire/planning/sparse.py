"""The scheme of sparse synchronisation for every tensor whose sparsity was measured."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..cost.sparse_schemes import (
    OF_ROWS,
    SCHEMES,
    SchemeChoice,
    SchemeInputs,
    explain_scheme,
    fastest_scheme,
    inputs_of,
)
from ..data.cluster import Cluster
from ..data.profile import Profile

MOST_EXPLAINED = 12


def schemes_of(profile: Profile, cluster: Cluster) -> dict[str, tuple[SchemeInputs, SchemeChoice]]:
    """The setting of each profiled sparse tensor on this cluster, and the scheme chosen for it."""
    sparsity = profile.sparsity
    if sparsity is None:
        return {}
    tensors = {tensor.name: tensor for layer in profile.layers for tensor in layer.tensors}
    found = {}
    for one in sparsity.tensors:
        tensor = tensors[one.name]
        at = inputs_of(
            one,
            tensor.numel,
            cluster,
            dtype=getattr(torch, tensor.dtype),
            handling=sparsity.handling,
        )
        found[one.name] = at, fastest_scheme(at, OF_ROWS if one.is_rows else SCHEMES)
    return found


def sentences(profile: Profile, cluster: Cluster) -> Iterator[str]:
    """Why each tensor takes its scheme: the largest first; nothing without a measured sparsity."""
    if profile.sparsity is None:
        return
    chosen = schemes_of(profile, cluster)
    if profile.sparsity.compressor is not None:
        yield f"The sparse gradient is the part that {profile.sparsity.compressor} takes."
    largest = sorted(chosen, key=lambda name: -chosen[name][0].dense_bytes)
    for name in largest[:MOST_EXPLAINED]:
        at, found = chosen[name]
        yield from explain_scheme(name, found, at)
    if len(largest) > MOST_EXPLAINED:
        yield f"{len(largest) - MOST_EXPLAINED} smaller tensors are chosen for in the same way."
