"""spardl: sums that are cut to their largest elements before each time they are sent.

Source: Zhao et al., ICDE 2024, "SparDL: Distributed deep learning training with
    efficient sparse communication": Spar-Reduce-Scatter and Bruck's all-gather within a
    team, Spar-All-Gather among teams (R-SAG and B-SAG), global residual collection.
Teams: W ranks in d teams of m = W / d neighbouring ranks: team 0 is ranks 0 to m-1.
    Each team sums up its chunks. Then the ranks of one place in all teams add up their
    sums of the same chunk. This takes 2 ceil(log2 m) + ceil(log2 d) rounds; one team
    takes 2 ceil(log2 W). Where neighbouring ranks share a host, a team can be a host.
    Then 2 (m-1) of the chunks that a rank sends stay in its host, and only sums of its
    own chunk leave it.
Differences from the paper:
    - If d is no power of two (B-SAG), ranks send their whole shares of a chunk to other
      teams, and the sum is cut to one share. The paper sends fewer elements, and adapts
      their number until the sum has about one share. Here the bytes of a step are known
      beforehand.
    - Several ranks hold a sum of several teams alike. The elements that they cut are
      divided among them: of g ranks, rank j keeps the places p with p mod g = j. Each
      element is kept once.
    - A chunk (the paper's block) is cut once, right before it is sent, from all that
      its sender holds of it by then: own elements and the sums that came. So a rank
      looks at each element once in a step.
    - Places are relative to their chunk, in the shortest code (``sparse/choose``),
      where the paper sends 4 bytes each. With ``formats="coo"`` it is the paper's form.
    - The mean travels in the gradient's dtype, rounded by the rank of each team that
      has the whole sum.
    - Sums are divided by W at the end. A sum beyond the working dtype's range arrives
      as inf.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 44 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Density: as asked, to the element; each of the m chunks has its share of it, and at
least 1 element.
Wire: with R = ceil(log2 m), in each of R rounds the chunks of distances g to g + s - 1
    to the team's rank g places on, for g = 2^(R-1), ..., 2, 1 and s = m - 2^(R-1), then
    g. Then sums of the own chunk to other teams: if d is a power of two, one in each of
    log2 d rounds, else d-1 in ceil(log2 d) rounds. Then in R more rounds the same
    numbers of chunks of the mean, back. So a rank sends m-1 chunks, T more with T =
    log2 d or d-1, and m-1 chunks of the mean. A chunk of L elements, K of them sent, is
    K values of v bytes and the least of 4 K (COO), ceil(L / 8) (hash bitmap) and ceil(K
    b / 8) + ceil((K + floor((L - 1) / 2^b)) / 8) with b = floor(log2((L - 1) / K))
    (``elias_fano``) bytes, rounded up to 8; v is the working dtype's, and of a mean the
    gradient's. In COO of float32 that is (2 (W-d) + T d) / W * 8 * K of all elements
    sent: as much for two teams as for one.
State: none. The sums that a rank holds lie in its residual while they are made.
Contributed: this rank's share of the mean. An element of a sum that is cut stays in the
    residual of the rank that cuts it, or of one of the ranks that cut it alike, with
    all that others have sent for it: what another rank would have had to keep is this
    one's now.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.compress._coo import check_addressable
from gradwire.contract import (
    Exchange,
    Layout,
    Member,
    Residual,
    Selection,
    State,
    Traits,
    synchronise_alone,
)
from gradwire.contract.bounds import check_share, check_whole
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Steps
from gradwire.errors import invalid

from .._lists import FORMATS, check_formats
from .chunks import Chunked, chunked
from .turn import Turn


@dataclass(frozen=True, kw_only=True)
class spardl(Exchange):
    """Averages a ``density`` share of the elements, the largest of sums that W ranks
    make.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.
        formats: "smallest" (the default): each chunk in the shortest of several
            formats. "coo": an index of 4 bytes and a value for each element, as in the
            paper. The means are equal.
        teams: The number of teams, d, from 1; default 1. It divides the number of ranks
            W. More teams take fewer rounds: log2 d fewer if W and d are powers of two.
            Their chunks are fewer and longer, so the selected elements are nearer to
            the largest of the whole gradient. Two teams send as many bytes as one team,
            and more teams send more.

    All ranks have the same settings. One rank alone sends nothing, whatever they are.

    >>> import torch
    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([1.0, 0.0, 4.0, 2.0]), torch.tensor([8.0, 2.0, 0.0, 2.0])]
    >>> run_local(spardl(density=0.25), grads)[0][0]
    tensor([4.5000, 0.0000, 0.0000, 0.0000])
    """

    density: float = 0.01
    formats: str = "smallest"
    teams: int = 1
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE, error_feedback=True, density_range=(1.0, 1.0)
    )

    def __post_init__(self) -> None:
        check_share("spardl density", self.density)
        check_formats("spardl formats", self.formats)
        check_whole("spardl teams", self.teams, "leave it at 1")

    def init(self, spec: TensorSpec, world: int) -> State:
        check_addressable("spardl", spec)
        if world > 1:
            self.members_of_a_team(world)
        return None

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        if me.world == 1:
            me.selection = None
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        chunks = self.chunks(TensorSpec.of(grad_N), me.world)
        yield from Turn(me, chunks, self.teams, grad_N, out_N, residual_N).steps()
        count = sum(chunks.counts)
        me.selection = Selection(self.density * grad_N.numel(), count, count)
        return state

    def chunks(self, spec: TensorSpec, world: int) -> Chunked:
        """The chunks of a gradient among ``world`` ranks, which are those of each
        team.
        """
        team = self.members_of_a_team(world)
        return chunked(
            spec.numel, spec.dtype, team, self.density, FORMATS[self.formats]
        )

    def members_of_a_team(self, world: int) -> int:
        """The number of ranks in each team.

        Raises:
            InvalidSetting: The teams do not divide the ranks evenly.
        """
        if world % self.teams:
            fitting = [
                str(number) for number in range(1, world + 1) if world % number == 0
            ]
            accepted = f"one of {', '.join(fitting)}, which divide {world} ranks evenly"
            remedy = "write one of them, or start another number of ranks"
            raise invalid("spardl teams", self.teams, accepted, remedy)
        return world // self.teams


EXAMPLES = (spardl(), spardl(density=0.3), spardl(density=0.3, formats="coo"))
