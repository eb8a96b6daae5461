"""randomk: the same elements on every rank, drawn afresh in each step.

Source: Stich, Cordonnier and Jaggi, NeurIPS 2018, "Sparsified SGD with memory", rand_k.
Differences from the paper: all ranks draw the same elements, so values are summed by an
    all-reduce and no index travels. The sampler: element j of the sample is where a
    ``Permutation``, a seeded bijection of [0, N), sends j; so K different ones in O(K),
    with no list of N. Its seed is two words of Philox at (seed, message, step).
Default: density 0.01, as of the sparsifiers that it is compared with. An element waits
    for 100 steps then, however large it is, and 400 steps of a small GPT end at 2.4
    times the loss of dense (docs/measured.md): draw more, or choose by magnitude.
Wire: an all-reduce of K values and one that tells whether all is finite, in the working
    dtype -> 2(W-1)/W * 4 * (K + 1) bytes a rank (8 for float64), K = max(1,
    round(density * N)).
State: (stream, step) of the random numbers, int64; the same on all ranks.
Contributed: this rank's values at the elements drawn. The density is as asked.
"""

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from gradwire.compress._coo import check_addressable
from gradwire.contract import Member
from gradwire.contract.bounds import MOST_SEED, check_whole
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Steps
from gradwire.dsl.philox import words
from gradwire.kernels.sparse.permutation import Permutation

from ._support import Pending, SelectedSupport, SharedSupport

NEXT_STEP = torch.tensor([0, 1], device="cpu")
"""The number that a step adds to (stream, step)."""


@dataclass(frozen=True, kw_only=True)
class randomk(SharedSupport):
    """Averages a random ``density`` share of elements, others in each step.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.
        seed: The seed of the random numbers that draw the elements, from 0 to 2**64 -
            1; default 0. All ranks pass the same, as all average the same elements.

    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.ones(1000), 3 * torch.ones(1000)]
    >>> mean = run_local(randomk(density=0.02), grads)[0][0]
    >>> int(mean.count_nonzero()), float(mean.max())
    (20, 2.0)
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("randomk seed", self.seed, "leave it out", least=0, most=MOST_SEED)

    def init(self, spec: TensorSpec, world: int) -> Tensor:
        check_addressable("randomk", spec)
        return first_place(spec)

    def select(
        self, me: Member, state: Tensor, pending: Pending
    ) -> Steps[SelectedSupport]:
        numel = pending.whole_N.numel()
        count = self.kept(numel)

        support_K = me.scratch("support", count, pending.whole_N, torch.int32)
        yield me.sized(
            "encode",
            lambda: draw_elements(self.seed, state, numel, support_K),
            count,
            lambda: support_K,
        )
        return SelectedSupport(support_K, count, state + NEXT_STEP)


def first_place(spec: TensorSpec) -> Tensor:
    """(stream, step) of a message's first step."""
    stream = crc32(spec.name.encode())
    return torch.tensor([stream, 0], device="cpu")


def draw_elements(seed: int, state: Tensor, numel: int, out_K: Tensor) -> Tensor:
    """Fills ``out_K`` (int32) with different indices below ``numel``, ascending.

    ``state`` is (stream, step).
    """
    stream, step = state.tolist()
    low, high = words(torch.tensor([0, 16]), seed, step, stream).tolist()
    torch.arange(out_K.numel(), out=out_K)
    Permutation(numel, seed=high << 32 | low).places(out_K, out=out_K)
    return out_K.copy_(out_K.sort().values)


EXAMPLES = (randomk(), randomk(density=0.3, seed=1))
