"""The law that values of 16 bits are rounded twice on their way, among any number of
ranks.

It takes an exchange without error feedback, and a case: see ``UP_TO_128_RANKS``.
"""

import torch
from torch import Tensor

from gradwire.contract import Exchange
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.by_name import run_local
from gradwire.exchange.error_feedback import Wrapper
from gradwire.exchange.pair import Pair

from .cases import Case
from .inputs import WIDE_KINDS, make_gradient
from .tolerance import must

KINDS = ("normal", "negative", *WIDE_KINDS)
"""The kinds of gradients. No two "negative" ones cancel, so their partial sums are
largest.
"""
WORLDS = (2, 3, 4, 5, 7, 8, 16, 33, 128)
UP_TO_128_RANKS = tuple(Case(world=world, numel=97, seed=world) for world in WORLDS)
"""A number of elements that few numbers of ranks divide."""
UP_TO_16_RANKS = tuple(case for case in UP_TO_128_RANKS if case.world <= 16)
"""The cases that ``gradwire check`` tries."""


def law_values_are_rounded_twice_among_any_number_of_ranks(
    exchange: Exchange, case: Case
) -> bool:
    """A dense mean is off by one rounding of each gradient, one of the mean, and
    float32 sums.

    Roundings are of the payload's dtype. Sums of W float32 terms are off by W + 2
    roundings of float32. Where the mean has another dtype of 16 bits than the payload,
    it is rounded once more.

    To do: add up values of 16 bits in float32 on one rank, as allreduce does. A
    collective that rounds partial sums at every hop declares encodes_sums = True.
    """
    wire = _wire(exchange, case)
    if wire is None or case.numel == 0 or case.world == 1:
        return False
    grads = [_of_all_kinds(case, rank) for rank in range(case.world)]
    mean_N = run_local(exchange, grads, seed=case.seed)[0][0]
    exact_WN = torch.stack([grad_N.double() for grad_N in grads])
    off_N = (mean_N.double() - exact_WN.mean(0)).abs()
    times_N = off_N / _allowed(exact_WN, wire, case)
    worst = int(times_N.argmax())
    must(
        float(times_N[worst]) <= 1,
        f"{case.world} ranks, {KINDS[worst // case.numel]}: a mean is off by "
        f"{float(times_N[worst]):.3g} times what two roundings to {wire} and "
        "sums in float32 allow",
    )
    return True


def _of_all_kinds(case: Case, rank: int) -> Tensor:
    """A rank's gradient: as many elements as the case has of each of ``KINDS``."""
    seed = 1000 * case.seed + rank
    return torch.cat(
        [make_gradient(kind, case.numel, case.dtype, seed) for kind in KINDS]
    )


def _wire(exchange: Exchange, case: Case) -> torch.dtype | None:
    """The dtype in which values travel whole, one an element; None if they do not."""
    # hosts add up in float32
    if isinstance(exchange, Wrapper) and exchange.ranks_per_host > 1:
        exchange = exchange.inner
    if not isinstance(exchange, Pair) or exchange.collective.encodes_sums:
        return None
    fields = exchange.codec.format(TensorSpec("", case.numel, case.dtype)).fields
    is_dense = len(fields) == 1 and fields[0].numel == case.numel
    if is_dense and fields[0].dtype.is_floating_point:
        return fields[0].dtype
    return None


def _allowed(grads_WN: Tensor, wire: torch.dtype, case: Case) -> Tensor:
    """The most by which each element of the mean may be off."""
    mean_N = grads_WN.mean(0).abs()
    size_N = grads_WN.abs().mean(0)
    rounded = [(wire, size_N), (wire, mean_N)]
    if case.dtype != wire:
        rounded.append((case.dtype, mean_N))
    allowed_N = (case.world + 2) * _rounding(size_N, torch.float32)
    for dtype, value_N in rounded:
        allowed_N += _rounding(value_N, dtype)
    return 1.01 * allowed_N  # of values that were rounded before


def _rounding(value_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The most that rounding to a dtype changes: half of the last place."""
    info = torch.finfo(dtype)
    return info.eps / 2 * value_N + info.eps / 2 * info.tiny


LAWS = (law_values_are_rounded_twice_among_any_number_of_ranks,)
