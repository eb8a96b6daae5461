"""``bench device``'s part ``bits``: a device's kernels give the bits of their
references.

The references are CompLL's interpreter, the coder's definition and the library's
partition, all on the host. Inputs are wide, as faults hide from normal gradients:
twenty octaves, several scales in a block, few distinct values, the smallest numbers,
one outlier, infinities and NaN. On a CPU the C++ stands for the device, or Triton's
interpreter where TRITON_INTERPRET is 1.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import TimeoutError, get_context
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from gradwire.cli.report.table import Row
from gradwire.contract import Compressor
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire.dsl import interp
from gradwire.dsl.build import Built
from gradwire.dsl.program import Program
from gradwire.kernels.libraries import has_triton
from gradwire.kernels.sparse.entries import Entries
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation, places_on_gpu
from gradwire_lab.kernels.hashing import hash_partition
from gradwire_lab.laws.inputs import WIDE_KINDS, make_gradient

Checked = Iterator[tuple[str, bool]]
"""Cases by what they compare, and whether the bits are equal."""
SIZES = (300, 4096, 10_007)
"""Elements of the gradients: around a block and a tile. Triton compiles for multiples
of 16, and for other numbers.
"""
KINDS = ("normal", *WIDE_KINDS, "huge", "both infs", "one nan")
"""The kinds of gradients."""
_PROCESSES = 8
_SEVERAL = (300, 4, 128, 1000), (1, 300, 65, 1000)
"""Elements of gradients that are encoded in one launch: in vectors, and one at a
time.
"""


def rows(
    device: torch.device, codecs: Sequence[Compressor], limit_s: float = math.inf
) -> Iterator[Row]:
    """A row for each program among ``codecs``, and for each kernel that is written by
    hand.

    For a GPU several processes compile and compare, so that a kernel that breaks its
    process, or never ends, hides no other. Rows come as they are ready.

    Args:
        device: The device whose kernels are compared with the host's references.
        codecs: Compressors; those that are no program have no kernels of their own
            here.
        limit_s: Seconds in which rows may come, for a GPU.
    """
    programs = {
        type(codec).__name__: codec for codec in codecs if isinstance(codec, Program)
    }
    if device.type != "cuda":
        by_hand = _BY_HAND if _is_interpreted() else {}
        for name in (*programs, *by_hand):
            yield row_of(name, device, programs.get(name))
        return
    if not has_triton():
        yield {
            "name": "bits",
            "note": "no triton, so programs have no kernels on this device",
        }
        return
    yield from rows_apart((*programs, *_BY_HAND), device, limit_s)


def rows_apart(
    names: Sequence[str], device: torch.device, limit_s: float
) -> Iterator[Row]:
    """The rows of these names as they are ready, each made in another process."""
    waiting = {*names}
    end_s = time.monotonic() + limit_s
    count = min(len(names), os.cpu_count() or 1, _PROCESSES)
    with get_context("spawn").Pool(count, torch.set_num_threads, (1,)) as pool:
        rows = pool.imap_unordered(partial(row_of, device=device), names)
        while waiting:
            try:
                row = rows.next(max(0.0, end_s - time.monotonic()))
            except TimeoutError:
                missing = ", ".join(sorted(waiting))
                yield {
                    "name": "bits",
                    "note": f"no answer in {limit_s:.0f} s: {missing}",
                }
                return
            waiting.discard(str(row["name"]).removeprefix("bits/"))
            yield row


def row_of(name: str, device: torch.device, program: Program | None = None) -> Row:
    """The row of one program, by default as it is shipped, or of one kernel written by
    hand.
    """
    if name in _BY_HAND:
        return _row(name, _BY_HAND[name](device))
    codec = program or load("compress", name)()
    return _row(name, _of_program(codec, device))


def gradients(numel: int) -> dict[str, Tensor]:
    """Gradients of so many elements, by what is awkward about them."""
    return {kind: make_gradient(kind, numel, torch.float32, numel) for kind in KINDS}


def _row(name: str, checked: Iterable[tuple[str, bool]]) -> Row:
    """The row of one kernel's cases; an error of one kernel hides no other."""
    count = 0
    differing = list[str]()
    note = ""
    try:
        with np.errstate(all="ignore"):  # by which Triton's interpreter computes
            for case, is_equal in checked:
                count += 1
                if not is_equal:
                    differing.append(case)
    except Exception as error:  # whatever a compiler or a driver raises
        note = f"{type(error).__name__}: {error}".splitlines()[0]
    if differing:
        note = "; ".join(
            [*filter(None, [note]), f"other bits: {', '.join(differing[:3])}"]
        )
    row: Row = {"name": f"bits/{name}", "num_compared": count, "ok": not note}
    return {**row, "note": note} if note else row


def _is_interpreted() -> bool:
    return has_triton() and os.environ.get("TRITON_INTERPRET") == "1"


def _launched(built: Built, kernel: Any, calls: Sequence[Any]) -> list[int]:
    return built.launcher.run_many(kernel, calls)


def _defined(built: Built, kernel: Any, calls: Sequence[Any]) -> list[int]:
    return [interp.run(kernel, call.tensors, call.numel, call.draws) for call in calls]


@contextmanager
def _by(run_many: Callable[..., list[int]] | None) -> Iterator[None]:
    """All kernels of programs run so; None leaves the choice to the library."""
    if run_many is None:
        yield
        return
    with mock.patch.object(Built, "run_many", run_many):
        yield


def _of_program(codec: Program, device: torch.device) -> Checked:
    ours = _launched if device.type == "cpu" and _is_interpreted() else None
    host = torch.device("cpu")
    for numel in SIZES:
        for kind, grad_N in gradients(numel).items():
            for has_residual in (True, False):
                with _by(_defined):
                    wanted = _made(codec, [grad_N], host, has_residual)
                with _by(ours):
                    made = _made(codec, [grad_N], device, has_residual)
                yield f"{numel} of {kind}", _are_equal(made, wanted)
    for sizes in _SEVERAL:
        grads = [gradients(numel)["log-uniform"] for numel in sizes]
        with _by(_defined):
            wanted = _made(codec, grads, host, True)
        with _by(ours):
            made = _made(codec, grads, device, True)
        yield f"several, {sizes}", _are_equal(made, wanted)


def _made(
    codec: Program, grads: Sequence[Tensor], device: torch.device, has_residual: bool
) -> list[Tensor]:
    """Payloads, residuals, sums and decoded vectors of gradients that are encoded in
    one call.
    """
    specs = [
        TensorSpec(f"layer {i}", g.numel(), torch.float32) for i, g in enumerate(grads)
    ]
    there = [grad_N.clone().to(device) for grad_N in grads]
    # Made on the host: a GPU divides by a number as it multiplies by its reciprocal.
    residuals = [
        (grad_N.flip(0).nan_to_num(0, 0, 0) / 3).to(device) for grad_N in grads
    ]
    sent = codec.encode_many(
        [codec.init(spec) for spec in specs], there, residuals if has_residual else None
    )
    payloads = [payload for payload, _ in sent]
    sums, plain = ([torch.ones_like(grad_N) for grad_N in there] for _ in range(2))
    for payload, sum_N in zip(payloads, sums, strict=True):
        codec.merge(payload, sum_N, scale=0.3)
    codec.decode_many(payloads, plain, scale=0.5)
    buffers = [payload.buffer for payload in payloads if payload.buffer is not None]
    return [
        buffer.cpu()
        for buffer in (*buffers, *map(_one_nan, (*residuals, *sums, *plain)))
    ]


def _one_nan(vector_N: Tensor) -> Tensor:
    """The vector with one NaN, which has the same bits everywhere."""
    return torch.where(vector_N == vector_N, vector_N, float("nan"))


def _are_equal(tensors: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    pairs = zip(tensors, wanted, strict=True)
    return all(
        tensor.shape == other.shape
        and torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
        for tensor, other in pairs
    )


def _of_permutation(device: torch.device) -> Checked:
    draw = torch.Generator().manual_seed(1)
    for numel in (1, 2, 1000, 4097, 2**31 - 1):
        indices_K = torch.randint(
            numel, (5000,), generator=draw, dtype=torch.int64
        ).int()
        shuffle = Permutation(numel, seed=5)
        found_K = torch.empty_like(indices_K, device=device)
        places_on_gpu(indices_K.to(device), shuffle, found_K)
        yield f"of {numel}", torch.equal(found_K.cpu(), shuffle.places(indices_K))


def _of_partition(device: torch.device) -> Checked:
    """Each part has the entries of the definition; their order is free."""
    draw = torch.Generator().manual_seed(2)
    for num_units, count, world in ((1003, 1003, 7), (9011, 900, 8), (300, 100, 3)):
        indices_K = torch.randperm(num_units, generator=draw)[:count].int()
        values = torch.randn(count, generator=draw)
        there = Entries(indices_K.to(device), values.to(device))
        shuffle = Permutation(num_units, seed=3)
        grouped = hash_partition(there, num_units, world, shuffle).parts
        wanted = partition(Entries(indices_K, values), num_units, world, shuffle)
        parts = [_sorted(grouped.of(rank)) for rank in range(world)]
        yield (
            f"{count} of {num_units}",
            parts == [_sorted(wanted.of(r)) for r in range(world)],
        )


def _sorted(entries: Entries) -> list[tuple[int, float]]:
    return sorted(zip(entries.indices_K.tolist(), entries.values.tolist(), strict=True))


def _of_runs(device: torch.device) -> Checked:
    from gradwire_lab.dsl import runs_launch
    from gradwire_lab.library.zero_run import zero_run as known

    draw = torch.Generator().manual_seed(3)
    for numel in (1, 90, 1000, 5000):
        codes_U = torch.randint(0, 243, (numel,), generator=draw, dtype=torch.uint8)
        is_run_U = torch.rand(numel, generator=draw) < 0.8
        plain_U = torch.where(is_run_U, torch.full_like(codes_U, known.of), codes_U)
        lengths_B, coded_C = known.encode(plain_U, 200)
        single, run, byte, times = (
            tensor.to(device)
            for tensor in (known.single, known.run, known.byte, known.times)
        )
        there_U = plain_U.to(device)
        own_B, own_C = runs_launch.encode_runs(
            there_U, 200, single, run, known.of, known.most
        )
        is_same = torch.equal(own_B.cpu(), lengths_B) and torch.equal(
            own_C.cpu(), coded_C
        )
        yield f"encode {numel}", is_same
        back_U = torch.full_like(there_U, 7)
        wrong = runs_launch.decode_runs(
            own_B, own_C, back_U, 200, byte, times, known.of
        )
        yield f"decode {numel}", wrong == -1 and torch.equal(back_U.cpu(), plain_U)


_BY_HAND: dict[str, Callable[[torch.device], Checked]] = {
    "permutation": _of_permutation,
    "algorithm 1": _of_partition,
    "zero_run": _of_runs,
}
