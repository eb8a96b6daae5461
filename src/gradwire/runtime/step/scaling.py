"""Loss scaling: gradients that a GradScaler multiplied are exchanged without the scale.

A GradScaler multiplies the loss, and with it every gradient, by a scale that changes during
training. State that an exchange keeps for later steps would have the scale of the step it comes
from: a residual that was held back at 1024 and arrives at 2048 counts half. So a message divides
the gradients that it gathers by the scale of its step, and multiplies the mean that it scatters.
All between is in units of the gradient: residuals, velocities, and settings such as a threshold or
the norm to clip to. A saved state has no scale, so it can be loaded under any. Ranks may even have
different scales.

Scales are powers of two unless the user says otherwise. Then division and multiplication change no
bit that ``GradScaler.unscale_`` would have kept. Gradients are copied into the message and out of
it anyway, and those copies multiply.

The alternative is to rescale state whenever the scale changes. It costs no less, as both copies are
made anyway. It must know which fields are in the gradient's unit, and leaves thresholds wrong.

In a step that the scaler skips, the part of the residual that was sent is lost. To give it back,
state would have to be copied in each step, which takes two thirds of the time of ``topk``. With 2
to 10 % of steps skipped, this loss moved the training loss by up to 0.4 %, up or down. The skips
themselves cost 1 to 2 %.

An exchange that sends the values themselves and keeps nothing takes scaled gradients: a scale is
there to bring values into the range of 16 bits, on the wire as in the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from ...contract import Exchange, Layout
from ...errors import InvalidSetting
from ...exchange.error_feedback import Wrapper
from ...exchange.pair import Pair


def scale_of(scaler: GradScaler | None) -> float:
    """The factor on the gradients of the backward pass that runs now."""
    return 1.0 if scaler is None else float(scaler.get_scale())


def unscaling_factor(scale: float) -> float:
    """The factor that takes a scale off again.

    For a scale that has shrunk to 0 there is none: the factor is inf, and gradients become NaN.
    """
    return 1.0 / scale if scale else math.inf


def copy_scaled(into: Sequence[Tensor], given: Sequence[Tensor], factor: float) -> None:
    """Copies tensors times a factor, between any devices."""
    if factor == 1.0:
        # One call for all of them: a copy each from Python costs microseconds apiece.
        torch._foreach_copy_(list(into), list(given))
        return
    for to, tensor in zip(into, given, strict=True):
        if to.device == tensor.device and to.dtype == tensor.dtype:
            torch.mul(tensor, factor, out=to)
        else:
            to.copy_(tensor).mul_(factor)


def travels_scaled(exchange: Exchange) -> bool:
    """Whether an exchange sends the values themselves and keeps nothing of them.

    >>> from gradwire.compress.cast16 import cast16
    >>> from gradwire.exchange.error_feedback import with_error_feedback
    >>> from gradwire.exchange.pair import pair
    >>> from gradwire.collective.allreduce import allreduce
    >>> plain = pair(cast16(dtype=torch.float16), allreduce())
    >>> travels_scaled(plain), travels_scaled(with_error_feedback(plain))
    (True, False)
    """
    if isinstance(exchange, Wrapper) and exchange.ranks_per_host > 1:  # TwoLevel
        exchange = exchange.inner
    return isinstance(exchange, Pair) and exchange.codec.traits.layout is Layout.DENSE


def refuse_float16(messages: Sequence[Any], scaler: GradScaler | None) -> None:
    """Raises ``InvalidSetting`` where float16 gradients without their scale would lose small
    elements."""
    for message in messages if scaler is not None else ():
        exchange = message.exchange
        if exchange is None or travels_scaled(exchange) or message.spec.dtype != torch.float16:
            continue
        raise InvalidSetting(
            f"scaler was given, and {message.names[0]} has gradients of float16, which "
            f"{exchange!r} takes without their scale: small ones would become 0; keep parameters "
            "in float32 and compute in autocast, as a GradScaler asks for, or exchange them by "
            "none or cast16"
        )
