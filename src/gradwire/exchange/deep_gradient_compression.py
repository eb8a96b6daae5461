"""Deep gradient compression in full: its paper's five parts, each of which stands alone as well.

Source: Lin et al., ICLR 2018, "Deep Gradient Compression: reducing the communication bandwidth for
    distributed training", section 3.
Differences: those that ``compress/dgc`` (sampled threshold, hierarchical selection),
    ``momentum`` (momentum correction and factor masking), ``clipping`` (local clipping) and
    ``density_warmup`` state. Five incompatible things are called DGC in public code; most are the
    selection alone, which here is ``compress.dgc``.
"""

from __future__ import annotations

from ..compress.dgc import dgc
from ..contract import Exchange
from ..contract.bounds import check_whole
from .clipping import check_norm, with_clipping
from .density_warmup import warming_to, with_density_warmup
from .momentum import with_momentum_correction


def deep_gradient_compression(
    *,
    warmup_steps: int,
    density: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip_norm: float | None = None,
    sample_share: float = 0.001,
    seed: int = 0,
) -> Exchange:
    """DGC as its paper has it; train with ``torch.optim.SGD`` without momentum.

    ``warmup_steps`` is the number of steps in which the density falls from 25 % to ``density``, in
    stages of equal length, which is rounded up to whole steps. The paper takes four epochs; 0 is no
    warm-up, and there is none for densities of 25 % and more. ``masking`` is the paper's momentum
    factor masking. It acts like a lower learning rate for elements that are sent often, so try
    without it where training falls behind (see ``with_momentum_correction``). ``clip_norm`` is the
    norm that gradients are clipped to (see ``with_clipping``), as the paper does for recurrent
    networks. ``sample_share`` is the share of a gradient, drawn from ``seed``, that the threshold
    is estimated from. Weight decay must be 1 / (1 - momentum) times momentum SGD's.

    >>> exchange = deep_gradient_compression(warmup_steps=400, clip_norm=0.25)
    >>> exchange.densities, exchange.steps_per_stage
    ((0.25, 0.0625, 0.015625, 0.004, 0.001), 100)
    """
    check_whole("warmup_steps", warmup_steps, "write 4 * len(train_loader)", least=0)
    codec = dgc(density=density, sample_share=sample_share, seed=seed)
    exchange: Exchange = with_momentum_correction(codec, momentum, nesterov, masking)
    if clip_norm is not None:
        check_norm("clip_norm", clip_norm)
        exchange = with_clipping(exchange, clip_norm)
    densities = warming_to(density)
    num_before = len(densities) - 1
    if not warmup_steps or not num_before:
        return exchange
    steps_per_stage = -(-warmup_steps // num_before)
    return with_density_warmup(exchange, steps_per_stage=steps_per_stage, densities=densities)
