"""Deep gradient compression in full: its paper's five parts.

Source: Lin et al., ICLR 2018, "Deep Gradient Compression: reducing the communication
    bandwidth for distributed training", section 3.
Differences: the docstrings of its parts state them: ``compress/dgc`` (sampled
    threshold, hierarchical selection), ``momentum`` (momentum correction and factor
    masking), ``clipping`` (local clipping) and ``density_warmup``. Public code calls
    five incompatible algorithms DGC. Most are the selection alone: ``compress.dgc``.
"""

from gradwire.contract import Exchange
from gradwire.contract.bounds import check_whole
from gradwire.errors import names_checked

from ..compress.dgc import dgc
from .clipping import check_norm, with_clipping
from .density_warmup import warming_to, with_density_warmup
from .momentum import with_momentum_correction


@names_checked
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
    """Deep Gradient Compression as in its paper.

    Train with ``torch.optim.SGD`` without momentum. Its weight decay must be
    1 / (1 - momentum) times the weight decay of momentum SGD.

    Args:
        warmup_steps: Steps in which the density falls from 25 % to ``density``, in
            equal stages, each rounded up. The paper takes four epochs. 0: no warm-up.
        density: The fraction of elements that are sent after the warm-up, in (0, 1];
            default 0.001.
        momentum: The factor of each rank's velocity in each step, in [0, 1); default
            0.9.
        nesterov: Whether the momentum is Nesterov's. Default: False.
        masking: Whether the velocity of sent elements is cleared. This acts like a
            lower learning rate for them, so try False if training falls behind.
            Default: True.
        clip_norm: The norm to which gradients are clipped, as in the paper for
            recurrent networks. None (the default): no clipping.
        sample_share: The share of a gradient from which the threshold is estimated.
            Default: 0.001.
        seed: The seed of the sample. Default: 0.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: A value is out of range.

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
    return with_density_warmup(
        exchange, steps_per_stage=steps_per_stage, densities=densities
    )
