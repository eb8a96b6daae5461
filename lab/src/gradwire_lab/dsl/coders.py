"""Coders: packed bytes of a field made fewer, each block by itself, and back.

    runs(v, of, most)   v in runs: (bytes, lengths)
    repeat(v, n)        each of v, n times

A program names one in ``concat`` (``codes=zero_run(map(gradient, code))``); ``extract``
gives the vector that went in. The kernels know nothing of it: they fill, and read, the
packed field; what lies in the payload instead is made of that, and of its blocks'
lengths.

A coder is a program too: ``encode`` maps the runs of a block's bytes, and ``decode``
repeats what it makes of each code. What both give depends on a byte and a length alone,
so a trace is tables, and the checker tries every byte and length there is: what is not
given back as it was is refused when the coder is made.

On the wire, behind the program's other fields: NAME_lengths int32, the coded bytes of
each block; NAME uint8, the blocks' bytes one behind the other. The length of the last
follows from the payload's size, so a payload has one such field at most.

Legend: U plain bytes, C coded ones, B blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from gradwire.contract.payload import Field, Format, Payload
from gradwire.dsl import ir
from gradwire.dsl.interp import evaluated
from gradwire.dsl.ir import INT32, UNSIGNED, Buffer, DType, Node, Op
from gradwire.dsl.language import Type
from gradwire.dsl.operators import check_name
from gradwire.dsl.symbols import Coded, Symbol, Vector, refuse, tracing
from gradwire.errors import RanksDiffer, invalid
from gradwire.kernels.libraries import has_triton, loader

from . import runs_launch

_SOURCES = Path(__file__).parent / "csrc"
_load_runs = loader("runs", _SOURCES)

_BYTE, _LENGTH, _PLAIN, _CODE = (ir.node(Op.ARG, dtype=INT32, arg=i) for i in range(4))
_NEVER = 2**31 - 1
"""The times of a code that no run has: longer than any block, so whoever sends it is
noticed.
"""

_cuts: ContextVar[list[tuple[int, int]] | None] = ContextVar("cuts", default=None)


class Repeated(Symbol):
    """The bytes that a decode makes of codes: each ``value`` as often as ``times``."""

    __slots__ = ("times", "value")

    def __init__(self, value: Node, times: Node) -> None:
        self.value = value
        self.times = times


def runs(vector: Vector, of: int, most: int) -> tuple[Vector, Vector]:
    """A coder's bytes cut into runs: the byte of each run, and its length.

    A run is up to ``most`` adjacent bytes that are ``of``, as many as there are from
    the left; every other byte is a run of one. Map them together to what is sent for
    each.
    """
    cuts = _cuts.get()
    if cuts is None:
        refuse(
            "runs() outside of a coder's encode", "send v through a coder, zero_run(v)"
        )
    if (
        not isinstance(vector, Vector)
        or vector.node is not _PLAIN
        or vector.keep is not None
    ):
        refuse(
            "runs of anything but the bytes that encode is given", "runs(plain, 0, 14)"
        )
    if cuts:
        refuse("runs() a second time", "cut the bytes once, and map the runs")
    if not _is_whole(of, 0, 255) or not _is_whole(most, 2, 256):
        refuse(
            f"runs of {of!r} up to {most!r}",
            "a byte, 0 to 255, up to a length of 2 to 256",
        )
    cuts.append((of, most))
    return Vector(_BYTE), Vector(_LENGTH)


def repeat(values: Vector, times: Vector) -> Repeated:
    """Every element of ``values``, a byte, as often as ``times`` says: what a decode
    ends with.
    """
    if _cuts.get() is None:
        refuse(
            "repeat() outside of a coder's decode",
            "send v through a coder, zero_run(v)",
        )
    if not isinstance(values, Vector) or not isinstance(times, Vector):
        refuse(
            "repeat of what is no vector",
            "repeat(map(coded, value), map(coded, times))",
        )
    return Repeated(_of("repeat", values, {_CODE}), _of("repeat", times, {_CODE}))


@dataclass(frozen=True, eq=False)
class Coder:
    """A reversible code of bytes that never makes them more.

    ``takes`` are the unsigned types whose packed bytes it can code. The rest are tables
    (int64): the codes of single bytes and of runs of ``of``, by length up to ``most``,
    and the byte and the times of each code. ``encode`` and ``decode`` say what they
    mean.
    """

    name: str
    takes: tuple[Type, ...]
    of: int
    most: int
    single: Tensor
    run: Tensor
    byte: Tensor
    times: Tensor

    @property
    def texts(self) -> tuple[object, ...]:
        tables = (self.single, self.run, self.byte, self.times)
        dtypes = (kind.dtype for kind in self.takes)
        return self.of, self.most, *dtypes, *(tuple(table.tolist()) for table in tables)

    def __call__(self, vector: Vector) -> Coded:
        """The vector, to be sent through this coder."""
        if not isinstance(vector, Vector) or vector.keep is not None:
            refuse(
                f"{self.name} of something other than a vector of all elements",
                "map first",
            )
        if vector.node.dtype not in {kind.dtype for kind in self.takes}:
            accepted = " or ".join(map(repr, self.takes))
            refuse(
                f"{self.name} of {vector.node.dtype!r}",
                f"convert its elements to {accepted}",
            )
        return Coded(vector.node, self)

    def library(self) -> ctypes.CDLL | None:
        """The compiled coders; None where the definition has to serve."""
        return _load_runs()

    def coding(self, field: Buffer, block: int) -> Coding:
        """The coding of a field, of which the kernels fill blocks of so many
        elements.
        """
        return Coding(self, field.name, field.dtype.packed_bytes(block))

    def encode(self, plain_U: Tensor, block_bytes: int) -> tuple[Tensor, Tensor]:
        """(lengths_B, coded_C) of blocks of so many bytes."""
        if _by_kernels(plain_U):
            tables = _on(plain_U.device, self.single, self.run)
            return runs_launch.encode_runs(
                plain_U, block_bytes, *tables, self.of, self.most
            )
        place_U = torch.arange(plain_U.numel(), device=plain_U.device)
        alike_U = plain_U == self.of
        first_U = place_U % block_bytes == 0
        # Before a run stands another byte, or the block's beginning.
        begins_U = alike_U & first_U
        goes_back_U = alike_U & ~first_U
        before_U = torch.where(goes_back_U, -1, place_U - begins_U.long())
        run_U = place_U
        if plain_U.numel():
            run_U = place_U - before_U.cummax(0).values
        length_U = (run_U - 1) % self.most + 1
        goes_on_U = torch.zeros_like(alike_U)
        goes_on_U[:-1] = alike_U[1:] & ~first_U[1:]
        sent_U = ~alike_U | ~goes_on_U | (length_U == self.most)
        run = self.run.to(plain_U.device)
        single = self.single.to(plain_U.device)
        code_U = torch.where(alike_U, run[length_U], single[plain_U.long()])
        lengths_B = place_U.new_zeros(-(-plain_U.numel() // block_bytes))
        lengths_B.index_add_(0, place_U // block_bytes, sent_U.long())
        return lengths_B, code_U[sent_U].to(torch.uint8)

    def decode(
        self, lengths_B: Tensor, coded_C: Tensor, plain_U: Tensor, block_bytes: int
    ) -> int:
        """Fills ``plain_U``; returns the first block that these are no code of, or
        -1.
        """
        if _by_kernels(plain_U):
            tables = _on(plain_U.device, self.byte, self.times)
            return runs_launch.decode_runs(
                lengths_B, coded_C, plain_U, block_bytes, *tables, self.of
            )
        code_C = coded_C.long()
        block_B = torch.arange(lengths_B.numel(), device=plain_U.device)
        times_C = self.times.to(plain_U.device)[code_C]
        filled_B = torch.zeros_like(lengths_B)
        filled_B.index_add_(0, block_B.repeat_interleave(lengths_B), times_C)
        room_B = (plain_U.numel() - block_B * block_bytes).clamp(max=block_bytes)
        wrong_B = filled_B != room_B
        if wrong_B.any():
            return int(wrong_B.int().argmax())
        plain_U.fill_(self.of)
        starts_C = times_C.cumsum(0) - times_C
        byte_C = self.byte.to(plain_U.device)[code_C]
        plain_U[starts_C] = byte_C.to(torch.uint8)
        return -1

    def pack(
        self, plain_U: Tensor, block_bytes: int, lengths_B: Tensor, coded_C: Tensor
    ) -> int:
        """Codes blocks of ``plain_U``, which is used up; returns how many bytes of
        ``coded_C``.
        """
        library = self.library() if plain_U.is_cpu else None
        if library is None:
            lengths, coded = self.encode(plain_U, block_bytes)
            lengths_B.copy_(lengths)
            coded_C[: coded.numel()] = coded
            return coded.numel()
        starts = torch.empty(lengths_B.numel() + 1, dtype=torch.int64, device="cpu")
        field = (plain_U, plain_U.numel(), block_bytes, lengths_B, starts, coded_C)
        tables = (self.of, self.most, self.single, self.run)
        return int(library.encode_runs(*field, *tables))

    def unpack(
        self, plain_U: Tensor, block_bytes: int, lengths_B: Tensor, coded_C: Tensor
    ) -> int:
        """Fills ``plain_U``; returns the first block that these are no code of, or
        -1.
        """
        library = self.library() if plain_U.is_cpu else None
        if library is not None:
            starts = torch.empty(lengths_B.numel() + 1, dtype=torch.int64, device="cpu")
            field = (plain_U, plain_U.numel(), block_bytes, lengths_B, starts, coded_C)
            tables = (coded_C.numel(), self.of, self.byte, self.times)
            return int(library.decode_runs(*field, *tables))
        starts = torch.arange(lengths_B.numel(), device=plain_U.device) * block_bytes
        room_B = (plain_U.numel() - starts).clamp(max=block_bytes)
        wrong_B = (lengths_B < 0) | (lengths_B > room_B)
        is_other_sum = lengths_B.sum() != coded_C.numel()
        if not (wrong_B.any() | is_other_sum):
            return self.decode(lengths_B.long(), coded_C, plain_U, block_bytes)
        if not lengths_B.numel():
            return 0
        return int(wrong_B.int().argmax())


def coder(
    name: str,
    *,
    takes: tuple[Type, ...],
    encode: Callable[[Vector], Vector],
    decode: Callable[[Vector], Repeated],
) -> Coder:
    """The coder of two functions in the language: one maps ``runs``, the other ends in
    ``repeat``.

    Raises InvalidSetting if some byte or run would not come back as it was.

    >>> from gradwire.dsl.language import *
    >>> from gradwire_lab.dsl.coders import coder, repeat, runs
    >>> pairs = coder(
    ...     "pairs",
    ...     takes=(uint_3,),
    ...     encode=lambda v: map(
    ...         runs(v, 0, 2), lambda byte, n: where(n == 2, 255, byte)
    ...     ),
    ...     decode=lambda v: repeat(
    ...         map(v, lambda code: where(code == 255, 0, code)),
    ...         map(v, lambda code: where(code == 255, 2, 1)),
    ...     ),
    ... )
    >>> pairs.encode(torch.tensor([0, 0, 0, 5], dtype=torch.uint8), 4)[1].tolist()
    [255, 0, 5]
    """
    check_name("coder", name)
    if not takes or not {kind.dtype for kind in takes} <= UNSIGNED:
        accepted = "one or more unsigned types"
        raise invalid(
            f"coder {name} takes", takes, accepted, "write (uint8,) or (uint_3,)"
        )
    top = max(242 if kind.dtype is DType.UINT_3 else 255 for kind in takes)
    with _cutting() as cuts, tracing(f"encode of coder {name}"):
        sent = encode(Vector(_PLAIN))
        if not cuts or not isinstance(sent, Vector):
            refuse(
                "a coder whose encode gives no run's codes",
                "return map(runs(v, 0, 14), f)",
            )
        code = _of("map", sent, {_BYTE, _LENGTH})
        of, most = cuts[0]
    with _cutting() as cuts, tracing(f"decode of coder {name}"):
        back = decode(Vector(_CODE))
        if not isinstance(back, Repeated):
            refuse(
                "a coder whose decode gives no repeated bytes",
                "return repeat(v, times)",
            )
    bytes_256 = torch.arange(256, dtype=torch.int32)
    lengths = torch.arange(most + 1, dtype=torch.int32)
    single = evaluated(
        code, {_BYTE: bytes_256, _LENGTH: torch.ones_like(bytes_256)}
    ).long()
    run = evaluated(
        code, {_BYTE: torch.full_like(lengths, of), _LENGTH: lengths}
    ).long()
    byte, times = (
        evaluated(n, {_CODE: bytes_256}).long() for n in (back.value, back.times)
    )
    made = [(int(single[b]), b, 1) for b in range(top + 1)]
    made += [(int(run[n]), of, n) for n in range(1, most + 1)]
    for sent_code, value, length in made:
        what = f"{length} times byte {value} sent as {sent_code}"
        if not 0 <= sent_code <= 255:
            refuse(what, "a code is a byte, 0 to 255")
        decoded_times = int(times[sent_code])
        decoded_byte = int(byte[sent_code])
        if decoded_times != length or decoded_byte != value:
            refuse(
                f"{what}, which comes back as {decoded_times} times byte "
                f"{decoded_byte}",
                "give every run a code of its own, and give it back in decode",
            )
    known = torch.zeros(256, dtype=torch.bool)
    known[[sent_code for sent_code, _, _ in made]] = True
    # of bytes that are none, and of no run
    single[top + 1 :] = 0
    run[0] = 0
    byte = torch.where(known, byte, 0)
    times = torch.where(known, times, _NEVER)
    return Coder(name, takes, of, most, single, run, byte, times)


@dataclass(frozen=True)
class Coding:
    """The coded field of a program: between what its kernels know and what travels."""

    coder: Coder
    name: str
    block_bytes: int
    """Packed bytes of a whole block."""

    def format(self, plain: Format, num_coded: int | None = None) -> Format:
        """The format that travels in place of the kernels' ``plain``; the largest by
        default.
        """
        packed = self._packed(plain)
        others = tuple(part for part in plain if part is not packed)
        num_blocks = -(-packed.numel // self.block_bytes)
        lengths = Field(f"{packed.name}_lengths", torch.int32, num_blocks)
        count = packed.numel
        if num_coded is not None:
            count = num_coded
        return Format((*others, lengths, Field(packed.name, torch.uint8, count)))

    def received(self, plain: Format, size_bytes: int) -> Format | None:
        """The format of a payload of so many bytes that travelled; None if none is that
        long.
        """
        count = size_bytes - self.format(plain, 0).size_bytes
        fits = 0 <= count <= self._packed(plain).numel
        return self.format(plain, count) if fits else None

    def encode(self, plain: Payload, largest: Payload) -> Payload:
        """The payload that travels in place of ``plain``, made in the front of
        ``largest``.
        """
        lengths, coded = largest.format.fields[-2:]
        for part in largest.format.fields[:-2]:
            largest[part.name].copy_(plain[part.name])
        operands = (
            plain[coded.name],
            self.block_bytes,
            largest[lengths.name],
            largest[coded.name],
        )
        format = self.format(plain.format, self.coder.pack(*operands))
        assert largest.buffer is not None
        return Payload(format, largest.buffer[: format.size_bytes])

    def decode(self, payload: Payload, plain: Format) -> Payload:
        """The kernels' payload, decoded from one that came; raises RanksDiffer if it
        cannot be.
        """
        assert payload.buffer is not None
        memory = torch.empty(
            plain.size_bytes, dtype=torch.uint8, device=payload.buffer.device
        )
        found = Payload(plain, memory)
        lengths, coded = payload.format.fields[-2:]
        for part in payload.format.fields[:-2]:
            found[part.name].copy_(payload[part.name])
        operands = (
            found[coded.name],
            self.block_bytes,
            payload[lengths.name],
            payload[coded.name],
        )
        wrong = self.coder.unpack(*operands)
        if wrong >= 0:
            raise RanksDiffer(
                f"field {coded.name} of a payload: block {wrong} is no "
                f"{self.coder.name} of "
                "its values; give every rank the same gradwire, compressor and settings"
            )
        return found

    def _packed(self, plain: Format) -> Field:
        return next(part for part in plain if part.name == self.name)


def _by_kernels(plain_U: Tensor) -> bool:
    """Whether bytes lie on a device that Triton's kernels are for."""
    return plain_U.device.type == "cuda" and has_triton()


@lru_cache(maxsize=64)
def _on(device: torch.device, first: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two tables on a device, copied there once: a tensor is a key by itself, not by
    its values.
    """
    return first.to(device), other.to(device)


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
    leaves = (node for node in ir.walk([vector.node]) if not node.sources)
    others = [leaf for leaf in leaves if leaf not in known and leaf.op is not Op.CONST]
    is_barred = any(
        node.op in (Op.REDUCE, Op.OPERATOR) for node in ir.walk([vector.node])
    )
    if (
        others
        or is_barred
        or vector.keep is not None
        or vector.node.dtype is ir.FLOAT32
    ):
        remedy = (
            "encode maps runs(v, ...) alone, decode what it is given alone, to "
            "whole numbers"
        )
        refuse(f"{operator} of more than a byte and its length", remedy)
    return vector.node


def _is_whole(value: object, least: int, most: int) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and least <= value <= most
    )
