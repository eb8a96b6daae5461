"""Buffers: what is gathered is scattered back, however gradients lie in memory."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from gradwire.runtime.device.devices import HOST
from gradwire.runtime.step.buffer import GradientBuffer
from gradwire.runtime.step.layout import MessageLayout, ParamRange
from tests.each import each


def buffer_of(
    *ranges: ParamRange, num_flags: int = 0, ahead: bool = False
) -> GradientBuffer:
    layout = MessageLayout("message", ranges, num_flags=num_flags, device="cpu", rank=0)
    return GradientBuffer(layout, HOST, ahead=ahead)


def strided() -> Tensor:
    """A gradient whose elements do not lie in the order of its indices."""
    return torch.arange(1.0, 25.0).view(4, 6).t()


@each("cut", [0, 1, 7, 12, 24])
@each("scale", [1.0, 8.0])
def test_parts_of_a_gradient_come_back_from_several_messages(
    cut: int, scale: float
) -> None:
    grad = strided()
    before = grad.clone()
    parts = [(first, last) for first, last in ((0, cut), (cut, 24)) if first < last]
    for first, last in parts:
        buffer = buffer_of(ParamRange("weight", grad, first, last))
        buffer.scale = scale
        assert buffer.gather([0], {"weight": grad}, nullcontext) == []
        expected_N = before.flatten()[first:last] / scale
        assert torch.equal(buffer.grad_N, expected_N)
        buffer.grad_N.mul_(2)
        buffer.scatter({"weight": grad})
    assert torch.equal(grad, 2 * before)


def test_gradients_lie_one_behind_the_other_and_flags_behind_them() -> None:
    grads: dict[str, Tensor | None] = {"a": strided(), "b": None, "c": torch.ones(3)}
    ranges = [ParamRange.whole(name, torch.zeros(6, 4)) for name in "ab"]
    buffer = buffer_of(*ranges, ParamRange.whole("c", torch.zeros(3)), num_flags=2)
    buffer.flat_N.fill_(7)
    assert buffer.gather(range(3), grads, nullcontext) == [1]
    parts_N = [strided().flatten(), torch.zeros(24), torch.ones(3), torch.full((2,), 7)]
    assert torch.equal(buffer.grad_N, torch.cat(parts_N))
    assert buffer.flags_F is not None
    assert buffer.flags_F.tolist() == [7, 7]


def test_a_gradient_that_travels_alone_is_lent_and_given_back() -> None:
    whole = ParamRange.whole("weight", torch.zeros(6, 4))
    grads: dict[str, Tensor | None] = {"weight": torch.ones(6, 4)}
    buffer = buffer_of(whole)
    assert buffer.can_borrow(grads)
    buffer.borrow(grads)
    buffer.gather([0], grads, nullcontext)
    buffer.grad_N.fill_(3)
    buffer.give_back()
    assert grads["weight"] is not None
    assert torch.equal(grads["weight"], torch.full((6, 4), 3.0))
    assert buffer.size_bytes == 0, "nothing was copied, so no buffer was made"


def test_what_must_be_copied_is_not_lent() -> None:
    whole = ParamRange.whole("weight", torch.zeros(6, 4))
    fit: dict[str, Tensor | None] = {"weight": torch.ones(6, 4)}
    scaled = buffer_of(whole)
    scaled.scale = 2.0
    assert not scaled.can_borrow(fit)
    assert not buffer_of(whole, num_flags=1).can_borrow(fit)
    assert not buffer_of(whole, ahead=True).can_borrow(fit)
    assert not buffer_of(ParamRange("weight", torch.zeros(6, 4), 0, 5)).can_borrow(fit)
    assert not buffer_of(whole).can_borrow({"weight": strided()})
    assert not buffer_of(whole).can_borrow({"weight": torch.ones(6, 4).double()})
    assert not buffer_of(whole).can_borrow({"weight": None})


def test_an_infinite_mean_is_told_by_parameter() -> None:
    ranges = [ParamRange.whole(name, torch.zeros(4)) for name in "ab"]
    buffer = buffer_of(*ranges)
    for value, names in ((1.0, set()), (torch.inf, {"b"}), (torch.nan, {"b"})):
        buffer.flat_N.fill_(1)
        buffer.flat_N[6] = value
        buffer.look()
        assert buffer.infinite() == names
    buffer.forget()
    assert buffer.infinite() == set()
