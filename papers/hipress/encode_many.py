r"""Batch compression: all gradients of a model encoded by one call, beside a call for
each.

    python -m papers.hipress.encode_many --only dgc --only topk --threads 1

And beside one vector of as many elements, which is what encoding tensors apart is to
cost little more than. Of a sparsifier there is a row of ``selective`` too: it encodes
the tensors apart, but for the smallest, which it leaves dense, and puts all of them
into one payload.

Source: HiPress, section 3.2; its table 6 has models of 148 and 399 gradients. Shapes
are the catalogue's. UGATIT-light has the number, the total and the largest that the
table gives; BERT-large has 398 gradients, and the table's total.

Large gradients take as long either way, so there is a row of all and one of the small
ones alone, those of up to ``SMALL`` elements.
"""

import statistics
from collections.abc import Sequence

import torch
import typer

from gradwire.cli.report.table import Row, plain
from gradwire.contract import Compressor, Member
from gradwire.contract.spec import TensorSpec
from gradwire.planning import catalogue
from gradwire_bench.figures import quartiles, threads_of_torch
from gradwire_bench.micro.kernel import TimedCall, seconds_in_turn, shipped
from gradwire_lab.compress.selective import selective

SMALL = 65536
"""Elements of the largest gradient that counts as small."""
MODELS = ("ugatit_light", "bert_large")


def sizes_of(model: str) -> list[int]:
    """Elements of each gradient of a model of the catalogue."""
    layers = catalogue.load(model).layers
    return [tensor.numel for layer in layers for tensor in layer.tensors]


def measure(codecs: Sequence[Compressor], threads: int, rounds: int = 15) -> list[Row]:
    """A row for each compressor, model and choice of its gradients: encode with error
    feedback.
    """
    with threads_of_torch(threads):
        rows = []
        for codec in codecs:
            for model in MODELS:
                sizes = sizes_of(model)
                small = [numel for numel in sizes if numel <= SMALL]
                rows += [
                    _row(codec, model, sizes, rounds),
                    _row(codec, model, small, rounds),
                ]
                if hasattr(codec, "density"):
                    rows.append(_selective_row(codec, model, sizes, rounds))
        return rows


def _row(codec: Compressor, model: str, sizes: Sequence[int], rounds: int) -> Row:
    specs = [TensorSpec(f"gradient {i}", numel) for i, numel in enumerate(sizes)]
    states = [codec.init(spec) for spec in specs]
    grad_N, residual_N = _vectors(sum(sizes))
    grads, residuals = (
        torch.split(vector, [*sizes]) for vector in (grad_N, residual_N)
    )
    buffers = [_buffer(codec, spec) for spec in specs]
    whole = TensorSpec("all", sum(sizes))
    whole_state = codec.init(whole)
    whole_buffer = _buffer(codec, whole)

    def one_by_one() -> None:
        for state, own_N, kept_N, buffer in zip(
            states, grads, residuals, buffers, strict=True
        ):
            codec.encode(state, own_N, residual_N=kept_N, buffer=buffer)

    def one_vector() -> None:
        codec.encode(whole_state, grad_N, residual_N=residual_N, buffer=whole_buffer)

    taken = _in_turn(
        [
            lambda: codec.encode_many(states, grads, residuals, buffers),
            one_by_one,
            one_vector,
        ],
        rounds,
    )
    batch, single, vector = taken
    return {
        "name": f"{type(codec).__name__}/{model}",
        "num_tensors": len(sizes),
        "elements": sum(sizes),
        "batch_s": statistics.median(batch),
        "call_a_tensor_s": statistics.median(single),
        "speedup_of_batch": statistics.median(_ratios(single, batch)),
        **_beside_vector(batch, vector),
    }


def _selective_row(
    codec: Compressor, model: str, sizes: Sequence[int], rounds: int
) -> Row:
    """A row of ``selective`` with this sparsifier; all ranks' merge is no part of
    it.
    """
    exchange = selective(sparsifier=type(codec).__name__)
    spec = TensorSpec("all", sum(sizes), shapes=tuple((numel,) for numel in sizes))
    mixed = exchange.mixed(spec)
    state = exchange.init(spec, 2)
    me = Member(0, 2)
    grad_N, residual_N = _vectors(spec.numel)
    room = torch.zeros(mixed.largest.slot_bytes, dtype=torch.uint8)
    whole_state = codec.init(spec)
    whole_buffer = _buffer(codec, spec)
    batch, vector = _in_turn(
        [
            lambda: mixed.encode(
                me, mixed.codec, state.codec_T, grad_N, residual_N, room
            ),
            lambda: codec.encode(
                whole_state, grad_N, residual_N=residual_N, buffer=whole_buffer
            ),
        ],
        rounds,
    )
    return {
        "name": f"selective ({type(codec).__name__})/{model}",
        "num_tensors": len(sizes),
        "num_dense": len(mixed.choice.dense),
        "elements": spec.numel,
        "batch_s": statistics.median(batch),
        **_beside_vector(batch, vector),
    }


def _vectors(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient and a residual."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=draw), torch.zeros(numel)


def _buffer(codec: Compressor, spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(codec.format(spec).size_bytes, dtype=torch.uint8)


def _in_turn(calls: Sequence[TimedCall], rounds: int) -> list[list[float]]:
    numbered = {str(number): call for number, call in enumerate(calls)}
    return [*seconds_in_turn(numbered, rounds, torch.device("cpu")).values()]


def _ratios(taken: Sequence[float], beside: Sequence[float]) -> list[float]:
    return [taken_s / other for taken_s, other in zip(taken, beside, strict=True)]


def _beside_vector(batch: Sequence[float], vector: Sequence[float]) -> Row:
    """The median of the batch's time over the vector's, and its quartiles."""
    return {
        "one_vector_s": statistics.median(vector),
        **quartiles("batch_over_vector", _ratios(batch, vector)),
    }


def main(only: list[str] | None = None, threads: int = 2, rounds: int = 9) -> None:
    """Measures compressors, by default onebit, terngrad and int8, and prints a row for
    each.
    """
    codecs = shipped(only or ("onebit", "terngrad", "int8"))
    print(plain(measure(codecs, threads, rounds)))


if __name__ == "__main__":
    typer.run(main)
