"""How much is fused where the user names no size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import gradwire as gw
from gradwire.contract.registry import examples
from gradwire.contract.verbs import AllReduce, Compute
from gradwire.exchange.without_data import bytes_of_rank
from gradwire.planning.default_fusion import default_cap_bytes, fuse
from tests.each import each
from tests.runtime.training import named

MIB = 2**20


@each("algorithm", examples("compress"), ids=named)
def test_a_model_may_have_more_elements_than_a_message(
    algorithm: gw.Compressor | gw.Exchange,
) -> None:
    """Messages of sparsifiers hold less than 2**31 elements, the model as many as there
    are.
    """
    huge = [(f"layer {i}", torch.empty(2**15, 2**15, device="meta")) for i in range(3)]
    cap_bytes = default_cap_bytes(huge, gw.exchange_for(algorithm), 4)
    assert 3 * 2**32 / 16 <= cap_bytes <= 3 * 2**32 / 4


def test_messages_are_of_four_mebibytes_on_the_wire() -> None:
    exchange = gw.exchange_for(gw.compress.none())
    for dtype in (torch.float32, torch.bfloat16):
        side = 4096 * 4 // dtype.itemsize  # 16 MiB
        params = [
            (f"layer {i}", torch.empty(1024, side, dtype=dtype)) for i in range(2)
        ]
        # A ring of two sends each byte once.
        assert default_cap_bytes(params, exchange, 2) == 4 * MIB
        # Of four, three halves of each.
        assert default_cap_bytes(params, exchange, 4) == -(-32 * MIB // 12)


def test_who_states_no_bytes_counts_as_uncompressed() -> None:
    params = [("weight", nn.Linear(2048, 4096, bias=False).weight)]
    assert default_cap_bytes(params, Own(asks=True), 2) == 4 * MIB


@dataclass
class Own(gw.Exchange):
    """A user's own exchange: its settings may change, and it may ask for a gradient's
    values.
    """

    asks: bool
    names: list[str] = field(default_factory=list)

    def init(self, spec: gw.TensorSpec, world: int) -> None:
        return None

    def synchronise(
        self,
        me: Any,
        state: Any,
        grad_N: torch.Tensor,
        out_N: torch.Tensor,
        residual_N: Any = None,
    ) -> Any:
        def read() -> torch.Tensor:
            return torch.from_numpy(grad_N.numpy()) if self.asks else grad_N

        yield AllReduce((yield Compute("encode", read, 0)))
        return state


def test_an_exchange_that_cannot_run_without_data_is_not_refused() -> None:
    spec = gw.TensorSpec("weight", 64)
    assert bytes_of_rank(Own(asks=False), spec, 2) == spec.size_bytes
    assert bytes_of_rank(Own(asks=True), spec, 2) is None


def test_large_gradients_travel_alone_and_small_ones_together() -> None:
    sizes = {"a": 10, "b": 600, "c": 40, "d": 500, "e": 498, "f": 502}

    def fused(unit: int) -> list[list[str]]:
        made = [
            (n, torch.empty(size * unit, 2, device="meta")) for n, size in sizes.items()
        ]
        found = fuse(
            made, kind=lambda name, param: None, cap_bytes=lambda kind: 8000 * unit
        )
        return [[name for name, _ in message] for message in found]

    assert fused(1000) == [["f"], ["d"], ["b"], [*"eca"]]
    # One more message costs more than the copy of a gradient below a mebibyte.
    assert fused(100) == [["f", "e"], ["d", "c", "b"], ["a"]]


def test_what_never_fills_goes_last_and_the_smallest_behind() -> None:
    made = [
        (n, torch.empty(size, device="meta"))
        for n, size in zip("abcd", (3, 9, 100, 5), strict=True)
    ]
    for kinds in ("xyzz", "yxzz", "zzyx"):
        kind_of = dict(zip("abcd", kinds, strict=True))
        found = fuse(
            made, kind=lambda n, _, of=kind_of: of[n], cap_bytes=lambda kind: 400
        )
        sizes = [sum(param.numel() for _, param in message) for message in found]
        assert sizes[0] >= 100
        assert sizes[1:] == sorted(sizes[1:], reverse=True)
