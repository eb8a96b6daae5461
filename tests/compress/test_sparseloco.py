"""sparseloco: what each chunk sends, and how much that is."""

from __future__ import annotations

import torch

from gradwire.compress.sparseloco import CHUNK, sparseloco


def test_every_chunk_sends_its_own_largest() -> None:
    """A chunk of small elements sends as many as one of large elements, and so does the rest."""
    torch.manual_seed(0)
    grad_N = torch.randn(2 * CHUNK + 640)
    grad_N[:CHUNK] *= 1e-3
    payload, _ = sparseloco().encode(None, grad_N)
    indices_K, values_K = sparseloco().entries(payload)
    assert torch.bincount(indices_K // CHUNK).tolist() == [64, 64, 10]
    for start in (0, CHUNK, 2 * CHUNK):
        chunk_N = grad_N[start : start + CHUNK]
        mine = (indices_K >= start) & (indices_K < start + CHUNK)
        largest = chunk_N.abs().topk(int(mine.sum())).indices.sort().values + start
        assert torch.equal(indices_K[mine].long(), largest)
        sizes = grad_N[largest].abs().double()
        is_high = sizes > sizes.mean()
        want = torch.where(is_high, sizes[is_high].mean(), sizes[~is_high].mean())
        torch.testing.assert_close(values_K[mine], (want * grad_N[largest].sign()).float())
