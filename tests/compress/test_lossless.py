"""lossless: the very bits, the two implementations, the sizes, and payloads that are
none.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gradwire as gw
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.by_name import run_local
from gradwire.kernels.libraries import reference_only
from tests.each import each

lossless, none = gw.compress.lossless, gw.compress.none
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAN, INF = float("nan"), float("inf")
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x_N: Tensor) -> Tensor:
    return x_N.view(INTEGERS[x_N.element_size()])


def gradients() -> list[Tensor]:
    """Few and many exponents, one, none, those of zeros and of what is not finite."""
    draw = torch.Generator().manual_seed(3)
    normal_N = torch.randn(9001, generator=draw)
    sparse_N = normal_N * (torch.rand(9001, generator=draw) < 0.1)
    odd_N = normal_N[:4100].clone()
    odd_N[:7] = torch.tensor([NAN, -INF, INF, -0.0, 1e-42, -1e-45, 3e38])
    any_N = torch.randint(-(2**31), 2**31 - 1, (4099,), generator=draw).to(torch.int32)
    wide_N = normal_N.exp() * 10.0 ** torch.randn(9001, generator=draw)
    short = [normal_N[:size] for size in (0, 1, 2, 3, 17, 70, 4095, 4096)]
    return [
        *short,
        sparse_N,
        torch.zeros(5000),
        odd_N,
        any_N.view(torch.float32),
        wide_N,
    ]


def sent(codec: gw.Compressor, grad_N: Tensor) -> gw.Payload:
    return codec.encode(None, grad_N)[0]


@each("dtype", DTYPES, ids=str)
def test_the_very_bits_come_back(dtype: torch.dtype) -> None:
    codec = lossless()
    for grad_N in gradients():
        own_N = grad_N.to(dtype)
        payload = sent(codec, own_N)
        assert payload.buffer is not None
        with reference_only():
            assert torch.equal(payload.buffer, sent(codec, own_N).buffer)
        back_N = codec.decode(payload, torch.empty_like(own_N))
        assert torch.equal(bits(back_N), bits(own_N))
        with reference_only():
            assert torch.equal(
                bits(codec.decode(payload, torch.empty_like(own_N))), bits(own_N)
            )


@each("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_those_of_none(dtype: torch.dtype) -> None:
    """Prescaled, scaled, added and decoded into another dtype: bit for bit what
    ``none`` does.
    """
    grad_N = gradients()[7].to(dtype)
    for into in (torch.float32, torch.bfloat16, torch.float64):
        for scale in (1 / 3, 1.0, 0.7):
            found = []
            for codec in (lossless(prescale=1 / 3), none(prescale=1 / 3)):
                payload, residual_N = sent(codec, grad_N), grad_N.float() / 7
                out_N = codec.decode(
                    payload, torch.empty(4096, dtype=into), scale=scale
                )
                sum_N = torch.linspace(-1, 1, 4096).to(into)
                codec.merge(payload, sum_N, scale=scale)
                kept, _ = codec.encode(None, grad_N, residual_N=residual_N)
                back_N = codec.decode(kept, torch.empty(4096, dtype=into), scale=scale)
                found.append(torch.cat([out_N, sum_N, back_N, residual_N.to(into)]))
            assert torch.equal(bits(found[0]), bits(found[1]))


def test_payloads_that_are_none_are_refused() -> None:
    """Sizes, headers and codes of other ranks: an error by name, by both
    implementations.
    """
    grad_N = torch.randn(9001, generator=torch.Generator().manual_seed(5))
    payload = sent(lossless(), grad_N)
    first, second, _ = payload["sizes"].tolist()
    at = payload.format.place("codes")[0]
    bits = int(payload.buffer[at])  # type: ignore[index]
    codes = at + 2**bits  # behind the bits of a code, and the exponents that have one
    damages: list[tuple[int, list[int]]] = [
        (0, [0, 0, 0, 0]),
        (0, [255, 255, 255, 255]),
        (0, list((first + 1).to_bytes(4, "little"))),
        (4, list((second - 1).to_bytes(4, "little"))),
        *((at, [wrong]) for wrong in (0, 1, 2, 4, 5, 6, 255) if wrong != bits),
        (codes, [255] * bits),
        (codes, [0] * 100),
        (at + first - 1, [255]),
    ]
    for place, damage in damages:
        buffer = payload.buffer.clone()  # type: ignore[union-attr]
        buffer[place : place + len(damage)] = torch.tensor(damage, dtype=torch.uint8)
        if torch.equal(buffer, payload.buffer):  # type: ignore[arg-type]
            continue
        wrong = gw.Payload(payload.format, buffer)
        said = []
        for reference in (False, True):
            try:
                with reference_only() if reference else nullcontext():
                    lossless().decode(wrong, torch.empty(9001))
                said.append("nothing")
            except gw.RanksDiffer as error:
                said.append(str(error))
        assert said[0] == said[1]
        assert "is no code of" in said[0] or place == at + first - 1


def test_the_size_of_a_payload_tells_its_layout() -> None:
    codec, spec = lossless(), TensorSpec("", 5000, torch.bfloat16)
    least = codec.format(TensorSpec("", 5000, torch.bfloat16)).size_bytes - 5000
    for codes in (2, 100, 5000):
        assert codec.received(spec, least + codes).fields[-1].numel == codes
    for wrong in (-1, least - 1, least + 5001):
        with pytest.raises(gw.InvalidSetting, match="size of a payload"):
            codec.received(spec, wrong)


def test_no_damage_ends_the_process() -> None:
    """Random bytes in every field: refused, or decoded to something else."""
    draw = torch.Generator().manual_seed(9)
    grad_N = torch.randn(9001, generator=draw)
    payload = sent(lossless(), grad_N)
    place = payload.format.place("codes")[0]
    refused = 0
    for turn in range(300):
        buffer = payload.buffer.clone()  # type: ignore[union-attr]
        first = place if turn % 2 else 0
        count = int(torch.randint(1, 40, (), generator=draw))
        spots = torch.randint(
            first, len(buffer) if turn % 2 else 12, (count,), generator=draw
        )
        buffer[spots] = torch.randint(
            0, 256, (count,), generator=draw, dtype=torch.uint8
        )
        try:
            lossless().decode(gw.Payload(payload.format, buffer), torch.empty(9001))
        except gw.RanksDiffer:
            refused += 1
    assert refused > 150


def test_a_deep_sigmoid_network_trains_with_the_bits_of_none() -> None:
    """Its gradients shrink by a factor with each layer, so one block has dozens of
    exponents.
    """
    world = 2
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.Sigmoid()) for _ in range(24)]
    first = nn.Sequential(*layers, nn.Linear(24, 3))
    models = {codec: deepcopy(first) for codec in (lossless(), none())}
    x_BN = torch.randn(world, 16, 24)
    for _ in range(2):
        for codec, model in models.items():
            grads = []
            for rank in range(world):
                model.zero_grad()
                model(x_BN[rank]).square().mean().backward()
                grads.append(parameters_to_vector([p.grad for p in model.parameters()]))
            exchange = gw.pair(codec, gw.collective.casync_ps())
            mean_N = run_local(exchange, grads)[0][0]
            with torch.no_grad():
                weights_N = parameters_to_vector(model.parameters()) - 0.1 * mean_N
                vector_to_parameters(weights_N, model.parameters())
    got, want = (parameters_to_vector(model.parameters()) for model in models.values())
    assert torch.equal(bits(got.detach()), bits(want.detach()))
