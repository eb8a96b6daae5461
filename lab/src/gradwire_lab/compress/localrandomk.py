"""localrandomk: each rank sends elements that it draws by itself, others in each step.

Source: Stich, Cordonnier and Jaggi, NeurIPS 2018, "Sparsified SGD with memory", rand_k;
    SSFusion (ICDE 2026), figure 4, takes it as a sparsifier like top-k.
Differences: the sampler is that of ``randomk``, with a seed of each rank's own. An
    element that is not finite takes the place of the last element drawn, so that every
    rank learns of it.
Default: density 0.01, as of the sparsifiers that it is compared with. An element waits
    for 100 steps then, however large it is: choose by magnitude where the loss counts.
Density: as asked, to the element.
Wire: indices_K int32 ascending, values_K float32 -> 8 * K bytes, K = max(1,
round(density * N)).
State: (stream, step) of the random numbers, int64.
Contributed: this rank's values at its elements (rounded to float32 if they are
    float64).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from gradwire.compress._coo import (
    Coo,
    check_addressable,
    coo_format,
    round_to_wire,
    share_of,
)
from gradwire.compress._residual import as_working
from gradwire.contract import Compressor, Layout, Memory, Residual, State, Traits
from gradwire.contract.bounds import MOST_SEED, check_share, check_whole
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import TensorSpec, clear_not_finite, spec_of

from .randomk import NEXT_STEP, draw_elements, first_place


@dataclass(frozen=True, kw_only=True)
class localrandomk(Coo):
    """Sends a random ``density`` share of elements, others on each rank and in each
    step.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.
        seed: The seed of the random numbers that draw the elements, from 0 to 2**64 -
            1; default 0. All ranks pass the same, and each draws others from it.

    >>> import torch
    >>> codec = localrandomk(density=0.5)
    >>> state = codec.init(TensorSpec("gradient", 4))
    >>> payload, _ = codec.encode(state, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> payload["indices"].numel()
    2
    """

    density: float = 0.01
    seed: int = 0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE,
        nonexpansive=True,
        error_feedback=True,
        density_range=(1.0, 1.0),
    )

    def __post_init__(self) -> None:
        check_share("localrandomk density", self.density)
        what = "localrandomk seed"
        check_whole(what, self.seed, "leave it out", least=0, most=MOST_SEED)

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        return _of_rank(self, rank)

    def init(self, spec: TensorSpec) -> State:
        return first_place(spec)

    def format(self, spec: TensorSpec) -> Format:
        check_addressable("localrandomk", spec)
        return coo_format(share_of(self.density, spec.numel))

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        payload = Payload.empty(self.format(spec_of(grad_N)), buffer, grad_N.device)
        whole_N = as_working(grad_N)
        if residual_N is not None:
            whole_N = residual_N.add_(whole_N)
        drawn_K = payload["indices"]
        draw_elements(self.seed, state, whole_N.numel(), drawn_K)
        _include_not_finite(whole_N, drawn_K)
        exact_K = whole_N[drawn_K.long()]
        if residual_N is not None:
            residual_N[drawn_K.long()] = 0.0
            clear_not_finite(residual_N)
        round_to_wire(payload["values"], exact_K, drawn_K, residual_N)
        return payload, state + NEXT_STEP


def _include_not_finite(whole_N: Tensor, drawn_K: Tensor) -> None:
    """Puts the first element that is not finite among the elements drawn."""
    wrong_K = whole_N.isfinite().logical_not_().nonzero()[:1, 0].int()
    if wrong_K.numel() and not bool((drawn_K == wrong_K).any()):
        drawn_K[-1:] = wrong_K
        drawn_K.copy_(drawn_K.sort().values)


@lru_cache(maxsize=256)
def _of_rank(codec: localrandomk, rank: int) -> localrandomk:
    """The codec with a rank's own seed; the same object at every call."""
    return replace(codec, seed=(codec.seed + rank * 0x9E3779B97F4A7C15) % 2**64)


EXAMPLES = (localrandomk(), localrandomk(density=0.3, seed=1))
