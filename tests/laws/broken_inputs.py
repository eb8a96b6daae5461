"""Deliberately careless with what users give: made of ``none`` and ``topk``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.compress.none import none
from gradwire.compress.nonzero import nonzero
from gradwire.compress.topk import topk
from gradwire.contract.payload import Field, Format, Payload
from gradwire.contract.spec import TensorSpec
from gradwire.errors import InvalidSetting


@dataclass(frozen=True, kw_only=True)
class believes_any_number(none):
    """Computes with a setting that may be none."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", float(self.factor))


@dataclass(frozen=True, kw_only=True)
class refuses_too_late(none):
    """Accepts what it refuses when it is to be used."""

    level: int = 1

    def encode(self, state: Any, grad_N: Tensor, **given: Any) -> Any:
        if not isinstance(self.level, int) or self.level > 2**31:
            raise InvalidSetting("level must be below 2**31")
        return super().encode(state, grad_N, **given)


@dataclass(frozen=True, kw_only=True)
class refuses_without_a_word(none):
    """Does not say which setting it refuses."""

    level: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.level, int):
            raise InvalidSetting("this cannot be")


@dataclass(frozen=True, kw_only=True)
class takes_any_width(nonzero):
    """Fills one short row up to any length."""

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise InvalidSetting("width must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class overflows(none):
    """Decodes garbage where its setting is large."""

    gain: int = 1

    def is_decoded(self, *, scale: float) -> bool:
        return False

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        is_large = isinstance(self.gain, int) and self.gain > 2**63
        return super().decode(payload, out_N, scale=float("nan") if is_large else scale)


class takes_anything(topk):
    """Reads the real part of whatever it is given, as float32."""

    def format(self, spec: TensorSpec) -> Format:
        return Format((Field("indices", torch.int32, 0), Field("values", torch.float32, 0)))

    def encode(self, state: Any, grad_N: Any, **given: Any) -> Any:
        return Payload.empty(self.format(TensorSpec("", 0))), state


class reads_memory(none):
    """Reads a gradient from its first element on, whatever its strides."""

    def encode(self, state: Any, grad_N: Tensor, **given: Any) -> Any:
        plain_N = grad_N
        if grad_N.numel() > 1 and grad_N.stride(0) > 1:
            plain_N = torch.as_strided(grad_N, grad_N.shape, (1,))
        return super().encode(state, plain_N, **given)
