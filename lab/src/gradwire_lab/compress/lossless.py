"""lossless: fewer bytes for the very same bits: exponents in few bits.

Source: ZipNN (Hershcovitch et al., 2024): exponents of models and gradients have few
    values, and take Huffman's codes; the bits below them are noise, and stay as they
    are.
Differences: all codes of a block of 4096 elements have one length, 1 to 5 bits, and
    stand for its most frequent exponents; the others follow as they are (Zukowski et
    al., ICDE 2006, PDICT). Prefix codes take as long, and fewer bytes: 2 % of float32
    and 5 % of bfloat16. A block whose codes would be no shorter sends its exponents as
    they are. float16 and float64 travel as they are.
Wire: sizes int32 of each block, low int16 of each element (float32 only), rest uint8 of
    each element, codes uint8 of at most N (``_exponents.py`` describes them) ->
    at most 4 * ceil(N / 4096) + N * itemsize bytes. Normally distributed elements take
    0.85 of their bytes as float32 and 0.70 as bfloat16.
State: none. Contributed: the gradient, as ``none`` sends it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compress._prescale import Prescaled
from gradwire.compress.none import none
from gradwire.contract import Layout, Memory, Residual, State, Traits
from gradwire.contract.payload import Field, Format, Payload
from gradwire.contract.spec import TensorSpec, spec_of
from gradwire.contract.thread_scratch import thread_scratch

from ._exponents import (
    BLOCK,
    CodedExponents,
    decode_exponents,
    encode_exponents,
)

_CODED = (torch.float32, torch.bfloat16)
TYPICAL_BITS = 3
"""The usual bits of an exponent, for sizes in plans and predictions."""


@dataclass(frozen=True, kw_only=True)
class lossless(Prescaled):
    """Sends gradients of float32 and bfloat16 in fewer bytes, and without any loss.

    The mean has the bits that ``none`` has through the same collective.

    Args:
        prescale: The factor of values on the wire, from 2**-24 to 1; default 1.
            Collectives that sum values on the way set it to 1/W, W being the number of
            ranks. Users leave it out.

    >>> codec, grad_N = lossless(), torch.arange(4096) / 64
    >>> payload, _ = codec.encode(None, grad_N)
    >>> torch.equal(codec.decode(payload, torch.empty(4096)), grad_N)
    True
    >>> payload.size_bytes < 0.85 * 4 * 4096
    True
    """

    prescale: float = 1.0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.PACKED,
        lossless=True,
        exact_size=False,
        unbiased=True,
        nonexpansive=True,
        host_only=True,  # without its C++ a block's code is read in Python
    )

    def format(self, spec: TensorSpec) -> Format:
        return _holding(spec, spec.numel)

    def typical(self, spec: TensorSpec) -> Format:
        return _holding(spec, -(-spec.numel * TYPICAL_BITS // 8))

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        num_codes = size_bytes - _holding(spec, 0).size_bytes
        if spec.dtype not in _CODED or not 0 <= num_codes <= spec.numel:
            return super().received(spec, size_bytes)  # of one size, or of none
        return _holding(spec, num_codes)

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        spec = spec_of(grad_N)
        if spec.dtype not in _CODED:
            return self._dense.encode(
                state, grad_N, residual_N=residual_N, buffer=buffer
            )
        value_N = grad_N.contiguous()
        factor = self.prescale
        if residual_N is not None or (spec.dtype != torch.float32 and factor != 1.0):
            memory = thread_scratch(
                "lossless", spec.size_bytes, torch.uint8, grad_N.device
            )
            sent, _ = self._dense.encode(
                state, grad_N, residual_N=residual_N, buffer=memory
            )
            value_N = sent["values"]
            factor = 1.0
        room = Payload.empty(self.format(spec), buffer, grad_N.device)
        num_codes = encode_exponents(value_N, _coded(room), factor)
        form = _holding(spec, num_codes)
        content = room.content[: form.size_bytes]
        return Payload(form, content if buffer is not None else content.clone()), state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        factor = scale / self.prescale
        if not _is_direct(payload, out_N) or (
            out_N.dtype != torch.float32 and factor != 1.0
        ):
            return self._dense.decode(_plain(payload, out_N), out_N, scale=scale)
        decode_exponents(_coded(payload), out_N, factor)
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        is_float32 = sum_N.dtype == torch.float32 and scale == self.prescale
        if is_float32 and _is_direct(payload, sum_N):
            decode_exponents(_coded(payload), sum_N, add=True)
        else:
            self._dense.merge(_plain(payload, sum_N), sum_N, scale=scale)

    @property
    def _dense(self) -> none:
        """The compressor whose values travel."""
        return none(prescale=self.prescale)


def _holding(spec: TensorSpec, num_codes: int) -> Format:
    """The layout of a payload whose exponents take so many bytes."""
    if spec.dtype not in _CODED:
        return none().format(spec)
    sizes = Field("sizes", torch.int32, -(-spec.numel // BLOCK))
    low = (
        (Field("low", torch.int16, spec.numel),) if spec.dtype == torch.float32 else ()
    )
    rest = Field("rest", torch.uint8, spec.numel)
    codes = Field("codes", torch.uint8, num_codes)
    return Format((sizes, *low, rest, codes))


def _dtype(payload: Payload) -> torch.dtype | None:
    """The dtype of the values whose exponents are coded.

    None where they travel as they are.
    """
    names = {field.name for field in payload.format}
    if "codes" not in names:
        return None
    return torch.float32 if "low" in names else torch.bfloat16


def _coded(payload: Payload) -> CodedExponents:
    low_N = None
    if _dtype(payload) == torch.float32:
        low_N = payload["low"]
    return CodedExponents(low_N, payload["rest"], payload["sizes"], payload["codes"])


def _is_direct(payload: Payload, out_N: Tensor) -> bool:
    """Whether the values can be decoded into this vector, which has their dtype."""
    return _dtype(payload) == out_N.dtype and out_N.is_contiguous()


def _plain(payload: Payload, out_N: Tensor) -> Payload:
    """The payload that ``none`` makes of the same values; valid until the next call."""
    dtype = _dtype(payload)
    if dtype is None:
        return payload
    form = none().format(TensorSpec("", out_N.numel(), dtype))
    memory = thread_scratch("lossless", form.size_bytes, torch.uint8, out_N.device)
    plain = Payload.empty(form, memory)
    decode_exponents(_coded(payload), plain["values"])
    return plain


EXAMPLES = (lossless(),)
