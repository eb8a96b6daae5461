"""Coders: packed bytes of a field made fewer, each block by itself, and back.

A program names one in ``concat`` (``codes=zero_run(map(gradient, code))``); ``extract`` gives the
vector that went in. The kernels know nothing of it: they fill, and read, the packed field; what
lies in the payload instead is made of that, and of its blocks' lengths.

On the wire, behind the program's other fields: NAME_lengths int32, the coded bytes of each block;
NAME uint8, the blocks' bytes one behind the other. The length of the last follows from the
payload's size, so a payload has one such field at most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..contract.payload import Field, Format, Payload
from ..errors import RanksDiffer, invalid
from ..kernels.compiler import CppSource, load_compiled
from .ir import UNSIGNED, Buffer, DType
from .language import Type
from .operators import check_name
from .rewrite import Traced
from .runs import Repeated, traced_runs
from .symbols import Coded, Vector, refuse

_HEADERS = Path(__file__).parent / "csrc"

_LIBRARY = """\
#include "coders.h"

{support}

GW_EXPORT int64_t encode(const gw::Field* field, int threads) {{
  return gw::encode_field(*field, threads, {name}_encode);
}}

GW_EXPORT int64_t decode(const gw::Field* field, int64_t num_coded, int threads) {{
  return gw::decode_field(*field, num_coded, threads, {name}_decode);
}}
"""


@dataclass(frozen=True, eq=False)
class Coder:
    """A reversible code of bytes that never makes them more.

    ``takes`` are the unsigned types whose packed bytes it can code. Two functions of tensors define
    it: ``encode(plain_U, block_bytes)`` gives (lengths_B int64, coded_C uint8), and
    ``decode(lengths_B, coded_C, plain_U, block_bytes)`` fills ``plain_U`` and returns the first
    block that these are no code of, or -1. ``cpp_support`` has NAME_encode and NAME_decode, as
    csrc/coders.h wants them.
    """

    name: str
    _: KW_ONLY
    takes: tuple[Type, ...]
    encode: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, Tensor, int], int]
    cpp_support: str

    def __post_init__(self) -> None:
        """Refuses a name that is none, types that are not packed, and a form that is missing."""
        what = f"coder {self.name}"
        check_name("coder", self.name)
        if not self.takes or not {kind.dtype for kind in self.takes} <= UNSIGNED:
            accepted = "one or more unsigned types"
            raise invalid(f"{what} takes", self.takes, accepted, "write (uint8,) or (uint_3,)")
        for form in ("encode", "decode"):
            function = f"{self.name}_{form}"
            if not callable(getattr(self, form)):
                remedy = "it defines the code"
                raise invalid(f"{what} {form}", getattr(self, form), "a function", remedy)
            if "#include" not in self.cpp_support and function not in self.cpp_support:
                accepted, remedy = f"C++ with {function}", "see csrc/coders.h"
                raise invalid(f"{what} cpp_support", self.cpp_support, accepted, remedy)

    @property
    def texts(self) -> tuple[object, ...]:
        return *(kind.dtype for kind in self.takes), self.cpp_support

    def __call__(self, vector: Vector) -> Coded:
        """The vector, to be sent through this coder."""
        if not isinstance(vector, Vector) or vector.keep is not None:
            refuse(f"{self.name} of something other than a vector of all elements", "map first")
        if vector.node.dtype not in {kind.dtype for kind in self.takes}:
            accepted = " or ".join(map(repr, self.takes))
            refuse(f"{self.name} of {vector.node.dtype!r}", f"convert its elements to {accepted}")
        return Coded(vector.node, self)

    def library(self) -> ctypes.CDLL | None:
        """The compiled coder; None where the definition has to serve."""
        return load_compiled(self._source)

    @cached_property
    def _source(self) -> CppSource:
        text = _LIBRARY.format(name=self.name, support=self.cpp_support)
        return CppSource(f"coder-{self.name}", text, _HEADERS)

    def pack(self, plain_U: Tensor, block_bytes: int, lengths_B: Tensor, coded_C: Tensor) -> int:
        """Codes blocks of ``plain_U``, which is used up; returns how many bytes of ``coded_C``."""
        library = self.library() if plain_U.is_cpu else None
        if library is None:
            lengths, coded = self.encode(plain_U, block_bytes)
            lengths_B.copy_(lengths)
            coded_C[: coded.numel()] = coded
            return coded.numel()
        field = _Field.of(plain_U, block_bytes, lengths_B, coded_C)
        count = int(library.encode(ctypes.byref(field), torch.get_num_threads()))
        if count < 0:
            remedy = "mend its C++ form"
            raise invalid(f"length of a block by coder {self.name}", count, "0 to its own", remedy)
        return count

    def unpack(self, plain_U: Tensor, block_bytes: int, lengths_B: Tensor, coded_C: Tensor) -> int:
        """Fills ``plain_U``; returns the first block that these are no code of, or -1."""
        library = self.library() if plain_U.is_cpu else None
        if library is not None:
            field = _Field.of(plain_U, block_bytes, lengths_B, coded_C)
            count = coded_C.numel()
            return int(library.decode(ctypes.byref(field), count, torch.get_num_threads()))
        starts = torch.arange(lengths_B.numel(), device=plain_U.device) * block_bytes
        room_B = (plain_U.numel() - starts).clamp(max=block_bytes)
        wrong_B = (lengths_B < 0) | (lengths_B > room_B)
        if not bool(wrong_B.any() | (lengths_B.sum() != coded_C.numel())):
            return self.decode(lengths_B.long(), coded_C, plain_U, block_bytes)
        return int(wrong_B.int().argmax()) if lengths_B.numel() else 0


def coder(
    name: str,
    *,
    takes: tuple[Type, ...],
    encode: Callable[[Vector], Vector],
    decode: Callable[[Vector], Repeated],
) -> Coder:
    """The coder of two functions in the language: one maps ``runs``, the other ends in ``repeat``.

    Raises InvalidSetting if some byte or run would not come back as it was.

    >>> from gradwire.dsl.language import *
    >>> pairs = coder(
    ...     "pairs",
    ...     takes=(uint_3,),
    ...     encode=lambda v: map(runs(v, 0, 2), lambda byte, n: where(n == 2, 255, byte)),
    ...     decode=lambda v: repeat(
    ...         map(v, lambda code: where(code == 255, 0, code)),
    ...         map(v, lambda code: where(code == 255, 2, 1)),
    ...     ),
    ... )
    >>> pairs.encode(torch.tensor([0, 0, 0, 5], dtype=torch.uint8), 4)[1].tolist()
    [255, 0, 5]
    """
    tops = {kind.dtype: 242 if kind.dtype is DType.UINT_3 else 255 for kind in takes}
    tables = traced_runs(name, max(tops.values(), default=255), encode, decode)
    return Coder(
        name,
        takes=takes,
        encode=tables.encode,
        decode=tables.decode,
        cpp_support=tables.cpp(name),
    )


@dataclass(frozen=True)
class Coding:
    """The coded field of a program: between what its kernels know and what travels."""

    field: Buffer
    block_bytes: int
    """Packed bytes of a whole block."""

    def format(self, plain: Format, num_coded: int | None = None) -> Format:
        """The format that travels in place of the kernels' ``plain``; the largest by default."""
        packed = self._packed(plain)
        others = tuple(part for part in plain if part is not packed)
        num_blocks = -(-packed.numel // self.block_bytes)
        lengths = Field(lengths_name(packed.name), torch.int32, num_blocks)
        count = packed.numel if num_coded is None else num_coded
        return Format((*others, lengths, Field(packed.name, torch.uint8, count)))

    def received(self, plain: Format, size_bytes: int) -> Format | None:
        """The format of a payload of so many bytes that travelled; None if none is that long."""
        count = size_bytes - self.format(plain, 0).size_bytes
        fits = 0 <= count <= self._packed(plain).numel
        return self.format(plain, count) if fits else None

    def encode(self, plain: Payload, largest: Payload) -> Payload:
        """The payload that travels in place of ``plain``, made in the front of ``largest``."""
        lengths, coded = largest.format.fields[-2:]
        for part in largest.format.fields[:-2]:
            largest[part.name].copy_(plain[part.name])
        coder: Coder = self.field.coder
        operands = (plain[coded.name], self.block_bytes, largest[lengths.name], largest[coded.name])
        format = self.format(plain.format, coder.pack(*operands))
        assert largest.buffer is not None
        return Payload(format, largest.buffer[: format.size_bytes])

    def decode(self, payload: Payload, plain: Format) -> Payload:
        """The kernels' payload, decoded from one that came; raises RanksDiffer if it cannot be."""
        assert payload.buffer is not None
        memory = torch.empty(plain.size_bytes, dtype=torch.uint8, device=payload.buffer.device)
        found, (lengths, coded) = Payload(plain, memory), payload.format.fields[-2:]
        for part in payload.format.fields[:-2]:
            found[part.name].copy_(payload[part.name])
        coder: Coder = self.field.coder
        operands = (found[coded.name], self.block_bytes, payload[lengths.name], payload[coded.name])
        wrong = coder.unpack(*operands)
        if wrong >= 0:
            raise RanksDiffer(
                f"field {coded.name} of a payload: block {wrong} is no {coder.name} of its values; "
                "give every rank the same gradwire, compressor and settings"
            )
        return found

    def _packed(self, plain: Format) -> Field:
        return next(part for part in plain if part.name == self.field.name)


def lengths_name(name: str) -> str:
    """The field of the lengths of a coded field's blocks."""
    return f"{name}_lengths"


@lru_cache(maxsize=1024)
def coding(program: Traced) -> Coding | None:
    """How a program's fields are coded; None if none is."""
    for buffer in program.buffers:
        if buffer.coder is not None:
            return Coding(buffer, buffer.dtype.packed_bytes(program.block))
    return None


class _Field(ctypes.Structure):
    """csrc/coders.h: Field."""

    _fields_ = (
        ("plain", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("coded", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, plain_U: Tensor, block_bytes: int, lengths_B: Tensor, coded_C: Tensor) -> _Field:
        starts = torch.empty(lengths_B.numel() + 1, dtype=torch.int64, device="cpu")
        found = cls(
            plain_U.data_ptr(),
            plain_U.numel(),
            block_bytes,
            lengths_B.data_ptr(),
            starts.data_ptr(),
            coded_C.data_ptr(),
        )
        found.scratch = starts  # lives as long as its address
        return found
