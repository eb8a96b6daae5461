"""A class with ``encode`` and ``decode`` in the language is a compressor.

>>> import torch
>>> from gradwire.dsl.language import *
>>> class sign(Program, nonexpansive=True, error_feedback=True):
...     block: int = 4096
...
...     def encode(self, gradient):
...         magnitude = reduce(map(gradient, abs), add) / size(gradient)
...         bits = map(gradient, lambda x: uint1(x >= 0))
...         return concat(magnitude=magnitude, bits=bits)
...
...     def decode(self, compressed):
...         magnitude, bits = extract(compressed)
...         return map(bits, lambda bit: where(bit == 1, magnitude, -magnitude))
>>> payload, _ = sign().encode(None, torch.tensor([1.0, -2.0, 6.0]))
>>> payload.size_bytes, sign().decode(payload, torch.empty(3))
(5, tensor([ 3., -3.,  3.]))

``Program`` turns the class into a frozen keyword-only dataclass (its annotations are
its settings), traces both functions once for each combination of settings, and gives it
the methods of ``contract.Compressor``: one generated kernel each. Keywords of the class
are its traits.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from ..contract import Layout, Traits
from ..contract.bounds import check_whole
from ..errors import invalid
from . import language, rewrite
from .build import Built
from .generated import Generated, Kernels
from .interp import LANES
from .ir import Buffer, Extent, Node, Op, load_buffer
from .language import Compressed, Scattered
from .rewrite import RESULT_NAME, recording
from .symbols import Coded, Scalar, Vector, tracing

# The encode and decode that an author writes have other parameters than the contract's,
# which take their place; so to a type checker a program may be anything.
if TYPE_CHECKING:
    _Generated = Any
else:
    _Generated = Generated

MOST_BLOCK = 2**31 - LANES
"""Elements of the longest block: ``size`` is an int32, as is a coded block's length."""

_KINDS: dict[str, type | tuple[type, ...]] = {
    name: kinds
    for kind, kinds in ((bool, bool), (int, int), (float, (int, float)))
    for name in (kind.__name__, str(kind))
}
"""The kinds of value that a setting may have, by its annotation's name or text."""


@dataclass(frozen=True)
class Source:
    """The author's functions of (settings, gradient) and of (settings, compressed).

    An encode of (settings, gradient, latest) is given the gradient plus the residual,
    and then the gradient alone.
    """

    encode: Callable[..., Compressed]
    decode: Callable[[Any, Compressed], Vector | Scattered]


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Program(_Generated):  # type: ignore[misc]  # a base of type Any: see above
    """Base of compressors written in the language; see the module's docstring.

    ``block`` is how many elements share what a reduction gives, a multiple of 64 below
    2^31: their number is an int32. A program that draws random numbers begins its
    stream from its setting ``seed``, if it has one.
    """

    block: int = 16384
    source: ClassVar[Source]
    traits: ClassVar[Traits] = Traits(layout=Layout.PACKED)

    def __init_subclass__(cls, **traits: Any) -> None:
        super().__init_subclass__()
        written = {
            name: cls.__dict__[name]
            for name in ("encode", "decode")
            if name in vars(cls)
        }
        if len(written) == 2:
            cls.source = Source(**written)
            for name in written:
                delattr(cls, name)  # the contract's own show through
        elif written or not hasattr(cls, "source"):
            raise invalid(
                cls.__name__, [*written], "a class with encode and decode", "write both"
            )
        cls.traits = replace(cls.traits, **traits)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Refuses settings of the wrong type, and what cannot be traced under these."""
        name = type(self).__name__
        for setting in fields(self):
            given = getattr(self, setting.name)
            kinds = _KINDS.get(str(setting.type))
            _check_hashable(f"{name} {setting.name}", given)
            right = kinds is None or isinstance(given, kinds)
            if not right or (isinstance(given, bool) and kinds not in (None, bool)):
                kind = str(getattr(setting.type, "__name__", setting.type))
                raise invalid(f"{name} {setting.name}", given, kind, "see its settings")
            # 1 and 1.0 are one setting, numpy's number is a number
            if kinds == _KINDS["float"]:
                object.__setattr__(
                    self, setting.name, _as_float(f"{name} {setting.name}", given)
                )
        check_whole(
            f"{name} block",
            self.block,
            "write 16384",
            least=LANES,
            most=MOST_BLOCK,
            multiple=LANES,
        )
        check_whole(
            f"{name} seed",
            getattr(self, "seed", 0),
            "leave it at 0",
            least=0,
            most=2**32 - 1,
        )
        if hasattr(self, "seed") and "seed" not in {
            setting.name for setting in fields(self)
        }:
            raise invalid(
                f"{name} seed", "a constant", "a setting", "write seed: int = 0"
            )
        self.check()
        traced = self.kernels().traced
        stated = self.stated()
        _check_traits(name, stated, traced)
        if traced.shares_scale:
            stated = replace(stated, shared_scale=True)
        object.__setattr__(self, "traits", stated)

    def check(self) -> None:
        """Refuses right-typed settings that make no sense; for authors to write."""

    def stated(self) -> Traits:
        """The traits under these settings; authors may write it where they vary."""
        return type(self).traits

    def kernels(self) -> Kernels:
        """The program under these settings, traced and rewritten.

        Compiled when first run.
        """
        return _kernels(self)


def _check_traits(name: str, stated: Traits, traced: rewrite.Traced) -> None:
    """Refuses traits that do not follow from a program's fields."""
    kept = traced.keep is not None
    coded = traced.coding is not None
    accepted = {
        "layout=Layout.SPARSE just with kept fields": kept
        == (stated.layout is Layout.SPARSE),
        "exact_size=False just with kept or coded fields": (kept or coded)
        != stated.exact_size,
        "reads_latest=True just where latest is read": traced.reads_latest
        == stated.reads_latest,
    }
    for what, holds in accepted.items():
        if not holds:
            raise invalid(f"{name} traits", stated, what, f"class {name}(Program, ...)")


def _check_hashable(what: str, value: object) -> None:
    """Programs are known by their settings."""
    try:
        hash(value)
    except TypeError:
        raise invalid(
            what,
            value,
            "a value that does not change",
            "give a tuple instead of a list",
        ) from None


def _as_float(what: str, value: float) -> float:
    try:
        # -0.0 equals 0.0, and equal settings share their kernels
        return float(value) + 0.0
    except OverflowError:
        raise invalid(
            what, value, "a number that a float holds", "see its settings"
        ) from None


@lru_cache(maxsize=1024)
def _kernels(codec: Program) -> Kernels:
    traced = trace(codec)
    forms = (
        rewrite.encode(traced),
        rewrite.encode_with_residual(traced),
        rewrite.decode(traced),
        rewrite.merge(traced),
    )
    stages = rewrite.stage_kernels(traced)
    staged = (
        k for stage in stages for k in (stage.plain, stage.with_residual, stage.fold)
    )
    every = {kernel.name: kernel for kernel in (*forms, *staged) if kernel is not None}
    return Kernels(traced, *forms, stages, Built(*every.values()))


def trace(codec: Program) -> rewrite.Traced:
    """Runs a program's two functions on symbols.

    Refuses what is no compressor, with the line.
    """
    inputs = [
        Vector(load_buffer(rewrite.GRADIENT)),
        Vector(load_buffer(rewrite.LATEST)),
    ]
    takes = len(signature(codec.source.encode).parameters) - 1
    name = type(codec).__name__
    with recording() as record, tracing(f"encode of {name}"):
        sent = codec.source.encode(codec, *inputs[:takes])
    if not isinstance(sent, Compressed) or not sent.fields:
        raise invalid(
            "what encode returns", sent, "a payload", "return concat(name=value, ...)"
        )
    sources = {_buffer(name, value): value.node for name, value in sent.fields.items()}
    _check_beside(sources)
    received = {buffer.name: _received(buffer) for buffer in sources}
    with tracing(f"decode of {name}"):
        decoded = codec.source.decode(codec, Compressed(received))
    kept = [
        v for v in sent.fields.values() if isinstance(v, Vector) and v.keep is not None
    ]
    return rewrite.Traced(
        name=re.sub(r"\W|^(?=\d)", "_", name),
        block=codec.block,
        fields=tuple(sorted(sources.items(), key=lambda field: field[0].extent)),
        decoded=_decoded_kept(decoded, sources) if kept else _decoded(decoded),
        stages=tuple(record.stages),
        keep=kept[0].keep if kept else None,
        top=kept[0].top if kept else None,
    )


def _decoded(decoded: object) -> Node:
    if not isinstance(decoded, Vector) or decoded.keep is not None:
        raise invalid(
            "what decode returns",
            decoded,
            "a vector of all elements",
            "return map(field, lambda q: ...) of a field with a value an element",
        )
    return language.float32(Scalar(decoded.node)).node


def _decoded_kept(decoded: object, sources: Mapping[Buffer, Node]) -> Node:
    remedy = "return scatter(indices, values) of its fields"
    if not isinstance(decoded, Scattered):
        raise invalid("what decode returns", decoded, "kept fields scattered", remedy)
    if sources[decoded.indices.arg].op is not Op.PLACE:
        raise invalid(
            "what decode scatters to",
            f"the field {decoded.indices.arg.name}",
            "the field of indices(kept)",
            remedy,
        )
    return decoded.node


def _buffer(name: str, value: Scalar | Vector | Coded) -> Buffer:
    if name in {buffer.name for buffer in rewrite.OWN_BUFFERS} or re.fullmatch(
        RESULT_NAME, name
    ):
        raise invalid(
            "field name", name, "no name that kernels use", f"call it {name}_sent"
        )
    if not name.isidentifier():
        raise invalid(
            "field name", name, "a name", "write letters, digits and underscores"
        )
    if isinstance(value, Scalar):
        return Buffer(name, value.node.dtype, value.node.extent)
    if isinstance(value, Coded):
        return Buffer(name, value.node.dtype, Extent.ELEMENT, value.coder)
    return Buffer(
        name, value.node.dtype, Extent.ELEMENT if value.keep is None else Extent.KEPT
    )


def _check_beside(buffers: Collection[Buffer]) -> None:
    """Refuses names that the lengths of another field's blocks have."""
    names = {buffer.name for buffer in buffers}
    beside = {
        f"{buffer.name}_lengths" for buffer in buffers if buffer.coder is not None
    }
    for name in sorted(names & beside):
        raise invalid(
            "field name", name, "a name that no other field uses", "choose another"
        )


def _received(buffer: Buffer) -> Scalar | Vector:
    field = load_buffer(buffer)
    return Vector(field) if buffer.extent >= Extent.ELEMENT else Scalar(field)
