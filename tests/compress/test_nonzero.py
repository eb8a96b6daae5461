"""nonzero: which units travel, their bits, sizes, and the two implementations of the
kernel.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract.spec import TensorSpec
from gradwire.kernels.libraries import reference_only
from gradwire.kernels.nonzero import nonzero_units as kept_units
from tests.each import each

nonzero = gw.compress.nonzero
NAN, INF = float("nan"), float("inf")


def test_what_travels_is_what_has_a_bit() -> None:
    grad_N = torch.tensor([0.0, -0.0, 1e-45, NAN, -INF, 0.0, 2.0])
    payload, _ = nonzero().encode(None, grad_N)
    assert payload["indices"].tolist() == [1, 2, 3, 4, 6]
    back_N = nonzero().decode(payload, torch.empty(7))
    assert torch.equal(back_N.view(torch.int32), grad_N.view(torch.int32))


def test_rows_travel_whole_and_the_last_is_filled_up() -> None:
    grad_N = torch.zeros(10)
    grad_N[1], grad_N[9] = 5.0, 7.0
    payload, _ = nonzero(width=4).encode(None, grad_N)
    assert payload["indices"].tolist() == [0, 2]
    assert payload["values"].tolist() == [0, 5, 0, 0, 0, 7, 0, 0]
    sum_N = torch.ones(10)
    nonzero(width=4).merge(payload, sum_N, scale=2.0)
    assert sum_N.tolist() == [1, 11, *[1] * 7, 15]


@each("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_size_of_a_payload_tells_its_layout(dtype: torch.dtype) -> None:
    """Whole entries; values of 8 bytes lie aligned behind an odd number of indices."""
    spec, codec = TensorSpec("", 100, dtype), nonzero(width=3)
    for count in (0, 1, 2, 33, 34):
        form = codec.holding(spec, count)
        indices = count * 4 + (4 if dtype == torch.float64 and count % 2 else 0)
        assert form.size_bytes == indices + count * 3 * dtype.itemsize
        assert codec.received(spec, form.size_bytes) == form
    for wrong in (1, codec.holding(spec, 35).size_bytes):
        with pytest.raises(gw.InvalidSetting):
            codec.received(spec, wrong)


def gradients() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    made = [torch.zeros(0), torch.zeros(5), torch.ones(17)]
    for numel, share in ((40_000, 0.01), (70_001, 0.5), (16_384 * 3, 1.0)):
        kept_N = torch.rand(numel, generator=draw) < share
        made.append(torch.randn(numel, generator=draw) * kept_N)
    return made


def kept(
    grad_N: Tensor, width: int, residual_N: Tensor | None, threads: int
) -> tuple[int, Tensor]:
    """How many units the kernel keeps, and the bytes of them; all of a residual is
    gone.
    """
    room = torch.zeros(-(-len(grad_N) // width) * 4 * (1 + width), dtype=torch.uint8)
    pending_N = None if residual_N is None else residual_N.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    count = kept_units(grad_N, room, width, pending_N)
    torch.set_num_threads(before)
    assert pending_N is None or not pending_N.any()
    return count, room[: count * 4 * (1 + width)]


@each("width", [1, 7, 20_000])
def test_kernel_is_its_reference(width: int) -> None:
    """The same bytes, with and without a residual, by any number of threads."""
    for grad_N in gradients():
        for residual_N in (None, grad_N.roll(1) * 0.5):
            with reference_only():
                want = kept(grad_N, width, residual_N, 1)
            for threads in (1, 2):
                count, room = kept(grad_N, width, residual_N, threads)
                assert count == want[0]
                assert torch.equal(room, want[1])
