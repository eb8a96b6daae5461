"""cltk: the k largest elements of one rank, each step of another, sent by all.

Source: Chen et al., NeurIPS 2020, "ScaleCom", section 3 (CLT-k: cyclic local top-k);
    DEFT, section 3.1, compares with it.
Differences from the paper: the leader's top-k is exact (ties to the lowest index), as
    DEFT has it, where ScaleCom's kernel takes the largest of each chunk; its low-pass
    filter of the residual, for large batches, is left out (beta = 1).
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 37 to 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Wire: a broadcast of K indices of b bytes by the leader, b the fewest whole bytes that
    hold N - 1; an all-reduce of K values and one that tells whether all is finite, in
    the working dtype -> 2(W-1)/W * 4 * (K + 1) bytes a rank (8 for float64), and b * K
    more for each copy that it passes on of the broadcast: W-1 in all, of which the
    leader sends ceil(log2 W). K = max(1, round(density * N)).
State: step, int64, the same on all ranks: rank step mod W leads.
Contributed: this rank's values at the leader's elements. The density is as asked.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compress._coo import check_addressable
from gradwire.contract import Member, Traits
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Broadcast, Steps
from gradwire.kernels import select

from ._narrow import narrow, widen, width_of
from ._support import Pending, SelectedSupport, SharedSupport


@dataclass(frozen=True, kw_only=True)
class cltk(SharedSupport):
    """Averages the ``density`` share of elements that are largest on the step's leader.

    Ranks take turns to lead.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.

    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([1.0, 0.0, 4.0, 2.0]), torch.tensor([8.0, 2.0, 0.0, 2.0])]
    >>> run_local(cltk(density=0.5), grads)[1][0]
    tensor([0., 0., 2., 2.])
    """

    # Ranks take turns to lead.
    traits: ClassVar[Traits] = replace(SharedSupport.traits, exact_size=False)

    def init(self, spec: TensorSpec, world: int) -> Tensor:
        check_addressable("cltk", spec)
        return torch.zeros(1, dtype=torch.int64, device="cpu")

    def select(
        self, me: Member, state: Tensor, pending: Pending
    ) -> Steps[SelectedSupport]:
        whole_N = pending.whole_N
        count = self.kept(whole_N.numel())
        width = width_of(whole_N.numel())
        leader = int(state) % me.world
        support_K = me.scratch("support", count, whole_N, torch.int32)
        sent = me.scratch("indices", count * width, whole_N, torch.uint8)

        def lead() -> None:
            if me.rank == leader:
                values_K = me.thread_scratch("largest", count, whole_N, whole_N.dtype)
                select.topk(whole_N, support_K, values_K)
                narrow(support_K, width, sent)

        def follow() -> None:
            if me.rank != leader:
                widen(sent, width, support_K)

        yield me.sized("encode", lead, whole_N.numel())
        yield Broadcast(leader, sent)
        yield me.sized("decode", follow, count)
        return SelectedSupport(support_K, count if me.rank == leader else 0, state + 1)


EXAMPLES = (cltk(), cltk(density=0.3))
