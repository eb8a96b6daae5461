"""oktopk: all that reach one threshold on each rank and another one in the sum.

Source: Li and Hoefler, PPoPP 2022, "Near-optimal sparse allreduce for distributed deep
    learning" (Ok-Topk): balanced split and reduce, balance and gather; constants of its
    published code.
Differences from the paper:
    - A threshold that fewer than half of what is asked for reach, or more than twice as
      many, is found anew in that step: the rank's own by looking again, that of sums by
      gathering all sums, or, of too many, twice what is asked for, of each region its
      share of them.
    - Regions are even in the first step, and are cut anew in step 1, 65, 129 ...
    - Sums are evened out by an all-to-all, which is there in every step, of no bytes
      where nothing moves. What each rank gathers is padded to the largest.
    - Places are relative to their region, in the shortest code (``sparse/choose``),
      where the paper sends 4 bytes each. With ``formats="coo"`` it is the paper's form.
    - Values are divided by W before they are added, and sums travel in the gradient's
      dtype.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md). Where ranks keep disagreeing about an element's sign, it is
    large on each and small in the sum: it is selected, not averaged, and stays in the
    residuals, which grow with it.
Density: exactly as asked in every 32nd step, from half to twice as much in the others.
Wire: with k = density * N, k / W of them in a region of L elements, 8 (W-1)
    how many elements it sends to each, to each (all-to-all) (W-1) * LIST(k / W)
    the elements of others' regions; values in the working dtype 16 (W-1)
    how many sums it has, and how many of these reach the threshold (W-1) * LIST(k / W)
    the sums that do; padded to the largest region's, and in every
                                    32nd step all sums; values in the gradient's dtype
    with LIST(K) = K values and the least of 4 K (COO), ceil(L / 8) (hash bitmap) and
    ceil(K b / 8) + ceil((K + floor((L - 1) / 2^b)) / 8) with b = floor(log2((L - 1) /
    K)) (``elias_fano``) bytes, rounded up to 8. In every 64th step an all-reduce of W-1
    borders of 8 bytes. In COO of float32 the lists are 4 k (W-1)/W words of 4 bytes;
    the paper's bound, 6 k (W-1)/W, counts evening out as well. If one rank has more
    than ``most_uneven`` times the mean of the sums that are gathered, they first move,
    as LISTs of their region, to ranks that have fewer. Then each rank sends equally
    many to all, with places of the whole gradient.
State: step, int64; thresholds_2, float64, the rank's own and that of sums, 0 where it
    is to be found; cuts_C, int64, the regions' inner borders. All but the own threshold
    are the same on all ranks.
Contributed: this rank's values at what it selected and the mean has. What it selected
    and the mean has not goes back to its residual.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.compress._coo import check_addressable, share_of
from gradwire.compress._residual import as_working
from gradwire.contract import (
    Exchange,
    Layout,
    Member,
    Residual,
    Selection,
    Traits,
    synchronise_alone,
)
from gradwire.contract.bounds import check_number, check_share
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import AllReduce, Steps

from .._lists import FORMATS, check_formats
from .regions import Regions, even_cuts, write_cuts
from .sums import Turn, no_entries
from .threshold import FEWEST, MOST, Taken, put_back, select_own

EXACT_STEPS = 32
"""Thresholds are found exactly in each of so many steps."""
CUT_STEPS = 64
"""Regions are cut anew in each of so many steps."""


class OktopkState(NamedTuple):
    """The step, the thresholds (a rank's own and that of sums) and the regions' inner
    borders.
    """

    step: Tensor
    thresholds_2: Tensor
    cuts_C: Tensor


@dataclass(frozen=True, kw_only=True)
class oktopk(Exchange):
    """Averages about a ``density`` share of the elements, the largest of the sum of all
    ranks.

    Each rank selects about as many of its own, and of their sums the largest are taken.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.
        formats: "smallest" (the default): each list of elements in the shortest of
            several formats. "coo": an index of 4 bytes and a value for each element, as
            in the paper. The means are equal.
        most_uneven: How many times the mean number of sums one rank may have, from 1;
            default 4. Above it ranks move sums to each other, which takes bytes and
            shortens the longest list. With infinity they never do.

    All ranks have the same settings.

    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([1.0, 0.0, 4.0, 2.0]), torch.tensor([8.0, 2.0, 0.0, 2.0])]
    >>> run_local(oktopk(density=0.25), grads)[0][0]
    tensor([4., 0., 0., 0.])
    """

    density: float = 0.01
    formats: str = "smallest"
    most_uneven: float = 4.0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE,
        exact_size=False,
        nonexpansive=True,
        error_feedback=True,
        density_range=(FEWEST, MOST),
    )

    def __post_init__(self) -> None:
        check_share("oktopk density", self.density)
        check_formats("oktopk formats", self.formats)
        most_uneven = self.most_uneven
        check_number(
            "oktopk most_uneven", most_uneven, "1 or more", "write 4.0", 1, float("inf")
        )

    def init(self, spec: TensorSpec, world: int) -> OktopkState:
        check_addressable("oktopk", spec)
        return OktopkState(
            torch.zeros(1, dtype=torch.int64, device="cpu"),
            torch.zeros(2, dtype=torch.float64, device="cpu"),
            even_cuts(spec.numel, world),
        )

    def synchronise(
        self,
        me: Member,
        state: OktopkState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[OktopkState]:
        if me.world == 1:
            me.selection = None
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        numel = grad_N.numel()
        step = int(state.step)
        asked = share_of(self.density, numel)
        own_threshold, shared = state.thresholds_2.tolist()
        if step % EXACT_STEPS == 0:
            own_threshold = 0.0
            shared = 0.0
        cuts_C = state.cuts_C
        if is_cut := step % CUT_STEPS == 1:
            cuts_C = me.scratch("cuts", me.world - 1, grad_N, torch.int64)

        def select() -> Taken:
            whole_N = as_working(grad_N)
            taken = select_own(me, whole_N, residual_N, own_threshold, asked)
            if is_cut:
                write_cuts(taken.entries.indices_K, numel, cuts_C)
            return taken

        taken: Taken = yield me.sized(
            "encode", select, numel, lambda: Taken(no_entries(grad_N, asked), 1.0)
        )
        if is_cut:
            yield AllReduce(cuts_C)
            cuts_C = cuts_C // me.world
        regions = Regions.of(cuts_C, numel, FORMATS[self.formats])
        turn = Turn(me, regions, asked, self.most_uneven, grad_N, out_N)
        sums = yield from turn.reduce(taken.entries)
        shared, arrived = yield from turn.gather(sums, shared)
        if residual_N is not None:
            yield me.sized(
                "decode",
                lambda: put_back(me, taken.entries, out_N, residual_N),
                numel,
            )
        me.selection = Selection(self.density * numel, taken.entries.num, arrived)
        thresholds_2 = torch.tensor(
            [taken.threshold, shared], dtype=torch.float64, device="cpu"
        )
        return OktopkState(state.step + 1, thresholds_2, cuts_C)


EXAMPLES = (
    oktopk(),
    oktopk(density=0.3),
    oktopk(density=0.3, most_uneven=1.0, formats="coo"),
)
