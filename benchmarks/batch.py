"""Batch compression: all gradients of a model encoded by one call, beside a call for each.

Source: HiPress, section 3.2; its table 6 has models of 148 and 399 gradients. UGATIT-light's shapes
follow from that model's definition; they have the number, the total and the largest that the table
gives. BERT-large's are the catalogue's (398 gradients, the table's total).

Large gradients take as long either way, so there is a row of all and one of the small ones alone,
those of up to ``SMALL`` elements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod

import torch

from gradwire import catalogue
from gradwire.bench.kernel import seconds
from gradwire.contract import Compressor
from gradwire.report.table import Row
from gradwire.spec import TensorSpec

SMALL = 65536
"""Elements of the largest gradient that counts as small."""


def ugatit_light() -> list[int]:
    """Elements of UGATIT-light's 148 gradients: two generators, two pairs of discriminators."""
    halves = [_generator(), _discriminator(7), _discriminator(5)]
    return [prod(shape) for half in halves for shape in half] * 2


def _generator(wide: int = 64, blocks: int = 4) -> list[tuple[int, ...]]:
    most = 4 * wide
    down = [(wide, 3, 7, 7), (2 * wide, wide, 3, 3), (most, 2 * wide, 3, 3)]
    residual = [(most, most, 3, 3)] * (2 * blocks)
    attention = [(1, most), (1, most), (most, 2 * most, 1, 1), (most,)]
    style = [(most, most)] * 4
    adaptive = [(most, most, 3, 3), (most,)] * (2 * blocks)
    up = [
        shape
        for width in (2 * wide, wide)
        for shape in ((width, 2 * width, 3, 3), (width,), (width,), (width,))
    ]
    return [*down, *residual, *attention, *style, *adaptive, *up, (3, wide, 7, 7)]


def _discriminator(num_layers: int, wide: int = 64) -> list[tuple[int, ...]]:
    widths = [3, *(wide * 2**i for i in range(num_layers - 1))]
    convolutions = [
        shape for narrow, broad in pairwise(widths) for shape in ((broad, narrow, 4, 4), (broad,))
    ]
    most = widths[-1]
    attention = [(1, most), (1, most), (most, 2 * most, 1, 1), (most,)]
    return [*convolutions, *attention, (1, most, 4, 4)]


def bert_large() -> list[int]:
    """Elements of BERT-large's gradients."""
    layers = catalogue.load("bert_large").layers
    return [tensor.numel for layer in layers for tensor in layer.tensors]


MODELS: dict[str, Callable[[], list[int]]] = {
    "ugatit_light": ugatit_light,
    "bert_large": bert_large,
}


def measure(codecs: Sequence[Compressor], threads: int, rounds: int = 15) -> list[Row]:
    """A row for each compressor, model and choice of its gradients: encode with error feedback."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = []
        for codec in codecs:
            for model, sizes_of in MODELS.items():
                sizes = sizes_of()
                small = [numel for numel in sizes if numel <= SMALL]
                rows += [_row(codec, model, sizes, rounds), _row(codec, model, small, rounds)]
        return rows
    finally:
        torch.set_num_threads(before)


def _row(codec: Compressor, model: str, sizes: Sequence[int], rounds: int) -> Row:
    specs = [TensorSpec(f"gradient {i}", numel) for i, numel in enumerate(sizes)]
    states = [codec.init(spec) for spec in specs]
    draw = torch.Generator().manual_seed(0)
    grads = [torch.randn(numel, generator=draw) for numel in sizes]
    residuals = [torch.zeros(numel) for numel in sizes]
    buffers = [torch.zeros(codec.format(spec).size_bytes, dtype=torch.uint8) for spec in specs]

    def one_by_one() -> None:
        for state, grad_N, residual_N, buffer in zip(
            states, grads, residuals, buffers, strict=True
        ):
            codec.encode(state, grad_N, residual_N=residual_N, buffer=buffer)

    timed = partial(seconds, device=grads[0].device)
    batch: list[float] = []
    single: list[float] = []
    for number in range(-1, rounds):
        figures = (
            timed(lambda: codec.encode_many(states, grads, residuals, buffers)),
            timed(one_by_one),
        )
        if number >= 0:
            batch.append(figures[0])
            single.append(figures[1])
    return {
        "name": f"{type(codec).__name__}/{model}",
        "num_tensors": len(sizes),
        "elements": sum(sizes),
        "batch_s": statistics.median(batch),
        "call_a_tensor_s": statistics.median(single),
        "speedup_of_batch": statistics.median(
            alone / together for alone, together in zip(single, batch, strict=True)
        ),
    }
