"""Coders that are programs: bytes cut into runs, a byte for each, and back.

    runs(v, of, most)   v in runs: (bytes, lengths)     repeat(v, n)   each of v, n times

``encode`` maps the runs of a block's bytes, and ``decode`` repeats what it makes of each code. What
both give depends on a byte and a length alone, so a trace is tables, and the checker tries every
byte and length there is: what is not given back as it was is refused when the coder is made.

Legend: U plain bytes, C coded ones, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.build import has_triton
from . import ir
from .interp import evaluated
from .ir import INT32, Node, Op
from .symbols import Symbol, Vector, refuse, tracing

_BYTE, _LENGTH, _PLAIN, _CODE = (ir.node(Op.ARG, dtype=INT32, arg=i) for i in range(4))
_NEVER = 2**31 - 1
"""The times of a code that no run has: longer than any block, so whoever sends it is noticed."""

_cuts: ContextVar[list[tuple[int, int]] | None] = ContextVar("cuts", default=None)


class Repeated(Symbol):
    """The bytes that a decode makes of codes: each ``value`` as often as ``times``."""

    __slots__ = ("times", "value")

    def __init__(self, value: Node, times: Node) -> None:
        self.value = value
        self.times = times


def runs(vector: Vector, of: int, most: int) -> tuple[Vector, Vector]:
    """A coder's bytes cut into runs: the byte of each run, and its length.

    A run is up to ``most`` adjacent bytes that are ``of``, as many as there are from the left;
    every other byte is a run of one. Map them together to what is sent for each.
    """
    cuts = _cuts.get()
    if cuts is None:
        refuse("runs() outside of a coder's encode", "send v through a coder, zero_run(v)")
    if not isinstance(vector, Vector) or vector.node is not _PLAIN or vector.keep is not None:
        refuse("runs of anything but the bytes that encode is given", "runs(plain, 0, 14)")
    if cuts:
        refuse("runs() a second time", "cut the bytes once, and map the runs")
    if not _is_whole(of, 0, 255) or not _is_whole(most, 2, 256):
        refuse(f"runs of {of!r} up to {most!r}", "a byte, 0 to 255, up to a length of 2 to 256")
    cuts.append((of, most))
    return Vector(_BYTE), Vector(_LENGTH)


def repeat(values: Vector, times: Vector) -> Repeated:
    """Every element of ``values``, a byte, as often as ``times`` says: what a decode ends with."""
    if _cuts.get() is None:
        refuse("repeat() outside of a coder's decode", "send v through a coder, zero_run(v)")
    if not isinstance(values, Vector) or not isinstance(times, Vector):
        refuse("repeat of what is no vector", "repeat(map(coded, value), map(coded, times))")
    return Repeated(_of("repeat", values, {_CODE}), _of("repeat", times, {_CODE}))


@dataclass(frozen=True, eq=False)
class RunTables:
    """A coder of runs: the codes of single bytes and of runs, and every code's byte and times."""

    of: int
    most: int
    single: Tensor
    run: Tensor
    byte: Tensor
    times: Tensor

    def encode(self, plain_U: Tensor, block_bytes: int) -> tuple[Tensor, Tensor]:
        """(lengths_B, coded_C) of blocks of so many bytes."""
        if _by_kernels(plain_U):
            tables = _on(plain_U.device, self.single, self.run)
            coded: tuple[Tensor, Tensor] = _gpu().encode_runs(
                plain_U, block_bytes, *tables, self.of, self.most
            )
            return coded
        place_U = torch.arange(plain_U.numel(), device=plain_U.device)
        alike_U, first_U = plain_U == self.of, place_U % block_bytes == 0
        # Before a run stands another byte, or the block's beginning.
        before_U = torch.where(alike_U & ~first_U, -1, place_U - (alike_U & first_U).long())
        run_U = place_U - before_U.cummax(0).values if plain_U.numel() else place_U
        length_U = (run_U - 1) % self.most + 1
        goes_on_U = torch.zeros_like(alike_U)
        goes_on_U[:-1] = alike_U[1:] & ~first_U[1:]
        sent_U = ~alike_U | ~goes_on_U | (length_U == self.most)
        run, single = self.run.to(plain_U.device), self.single.to(plain_U.device)
        code_U = torch.where(alike_U, run[length_U], single[plain_U.long()])
        lengths_B = place_U.new_zeros(-(-plain_U.numel() // block_bytes))
        lengths_B.index_add_(0, place_U // block_bytes, sent_U.long())
        return lengths_B, code_U[sent_U].to(torch.uint8)

    def decode(self, lengths_B: Tensor, coded_C: Tensor, plain_U: Tensor, block_bytes: int) -> int:
        """Fills ``plain_U``; returns the first block that these are no code of, or -1."""
        if _by_kernels(plain_U):
            tables = _on(plain_U.device, self.byte, self.times)
            decoded = _gpu().decode_runs
            return int(decoded(lengths_B, coded_C, plain_U, block_bytes, *tables, self.of))
        code_C, block_B = coded_C.long(), torch.arange(lengths_B.numel(), device=plain_U.device)
        times_C = self.times.to(plain_U.device)[code_C]
        filled_B = torch.zeros_like(lengths_B)
        filled_B.index_add_(0, block_B.repeat_interleave(lengths_B), times_C)
        room_B = (plain_U.numel() - block_B * block_bytes).clamp(max=block_bytes)
        if not torch.equal(filled_B, room_B):
            return int((filled_B != room_B).int().argmax())
        plain_U.fill_(self.of)
        plain_U[times_C.cumsum(0) - times_C] = self.byte.to(plain_U.device)[code_C].to(torch.uint8)
        return -1

    def cpp(self, name: str) -> str:
        """The same in C++, as csrc/coders.h wants it; csrc/runs.h reads the tables."""
        tables = "\n".join(
            f"static constexpr {kind} {name}_{table}[] = {{{str(values.tolist())[1:-1]}}};"
            for kind, table, values in (
                ("uint8_t", "single", self.single),
                ("uint8_t", "run", self.run),
                ("uint8_t", "byte", self.byte),
                ("int32_t", "times", self.times),
            )
        )
        return f"""\
#include "runs.h"
{tables}
static int64_t {name}_encode(uint8_t* bytes, int64_t n) {{
  return gw::encode_runs<{self.of}, {self.most}>(bytes, n, {name}_single, {name}_run);
}}
static bool {name}_decode(const uint8_t* in, int64_t length, uint8_t* out, int64_t n) {{
  return gw::decode_runs<{self.of}>(in, length, out, n, {name}_byte, {name}_times);
}}"""


def _by_kernels(plain_U: Tensor) -> bool:
    """Whether bytes lie on a device that Triton's kernels are for."""
    return plain_U.device.type == "cuda" and has_triton()


@lru_cache(maxsize=64)
def _on(device: torch.device, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two tables on a device, copied there once: a tensor is a key by itself, not by its values."""
    return one.to(device), other.to(device)


def traced_runs(
    name: str, top: int, encode: Callable[[Vector], Vector], decode: Callable[[Vector], Repeated]
) -> RunTables:
    """The tables of a coder's two functions, for plain bytes of 0 to ``top``; all are tried."""
    with _cutting() as cuts, tracing(f"encode of coder {name}"):
        sent = encode(Vector(_PLAIN))
        if not cuts or not isinstance(sent, Vector):
            refuse("a coder whose encode gives no run's codes", "return map(runs(v, 0, 14), f)")
        code = _of("map", sent, {_BYTE, _LENGTH})
        of, most = cuts[0]
    with _cutting() as cuts, tracing(f"decode of coder {name}"):
        back = decode(Vector(_CODE))
        if not isinstance(back, Repeated):
            refuse("a coder whose decode gives no repeated bytes", "return repeat(v, times)")
    bytes_256 = torch.arange(256, dtype=torch.int32)
    lengths = torch.arange(most + 1, dtype=torch.int32)
    single = evaluated(code, {_BYTE: bytes_256, _LENGTH: torch.ones_like(bytes_256)}).long()
    run = evaluated(code, {_BYTE: torch.full_like(lengths, of), _LENGTH: lengths}).long()
    byte, times = (evaluated(n, {_CODE: bytes_256}).long() for n in (back.value, back.times))
    made = [(int(single[b]), b, 1) for b in range(top + 1)]
    made += [(int(run[n]), of, n) for n in range(1, most + 1)]
    for sent_code, value, length in made:
        what = f"{length} times byte {value} sent as {sent_code}"
        if not 0 <= sent_code <= 255:
            refuse(what, "a code is a byte, 0 to 255")
        found = int(times[sent_code]), int(byte[sent_code])
        if found != (length, value):
            refuse(
                f"{what}, which comes back as {found[0]} times byte {found[1]}",
                "give every run a code of its own, and give it back in decode",
            )
    known = torch.zeros(256, dtype=torch.bool)
    known[[sent_code for sent_code, _, _ in made]] = True
    single[top + 1 :], run[0] = 0, 0  # of bytes that are none, and of no run
    return RunTables(
        of, most, single, run, torch.where(known, byte, 0), torch.where(known, times, _NEVER)
    )


@cache
def _gpu() -> Any:
    """The same coders for a GPU."""
    from .gpu import runs

    return runs


@contextmanager
def _cutting() -> Iterator[list[tuple[int, int]]]:
    cuts: list[tuple[int, int]] = []
    token = _cuts.set(cuts)
    try:
        yield cuts
    finally:
        _cuts.reset(token)


def _of(operator: str, vector: Vector, known: set[Node]) -> Node:
    """The expression of a vector; refuses what is not made of ``known`` alone."""
    leaves = (found for found in ir.walk([vector.node]) if not found.sources)
    others = [found for found in leaves if found not in known and found.op is not Op.CONST]
    held = any(found.op in (Op.REDUCE, Op.OPERATOR) for found in ir.walk([vector.node]))
    if others or held or vector.keep is not None or vector.node.dtype is ir.FLOAT32:
        remedy = "encode maps runs(v, ...) alone, decode what it is given alone, to whole numbers"
        refuse(f"{operator} of more than a byte and its length", remedy)
    return vector.node


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
