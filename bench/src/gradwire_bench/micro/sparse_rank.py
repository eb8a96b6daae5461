"""One rank of ``bench sparse``: takes one sparse gradient through every scheme, in
turn.
"""

import torch
from torch import Tensor

from gradwire.compress.nonzero import nonzero
from gradwire.contract import Exchange
from gradwire.contract.collective import Collective
from gradwire.contract.registry import examples, load
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.pair import pair

from ..testbed.ranks import Json, Report, in_turn
from .draws import IndexDraws
from .exchange_rank import TimedExchange, open_engine

DENSE = "dense"
PAPER = "zen_paper"
OWN: dict[str, tuple[str, Json]] = {
    f"{name}{suffix}": (name, {"formats": formats})
    for name in ("oktopk", "spardl")
    for suffix, formats in (("", "smallest"), ("_paper", "coo"))
}
"""The exchanges of their own that make sparse sums, by name, each in its settings and
its paper's: the name of its file, and its settings.
"""
TEAMS: dict[str, tuple[str, Json]] = {
    f"spardl_{teams}_teams": ("spardl", {"teams": teams}) for teams in (2, 4)
}
"""SparDL in teams, which must divide the hosts. They are measured only if they are
asked for.
"""
SCHEMES: dict[str, Collective] = {
    type(scheme).__name__: type(scheme)()
    for scheme in examples("collective")
    if scheme.dimensions is not None
} | {PAPER: load("collective", "zen")(formats="paper")}
"""Every collective that has a place among the paper's schemes (table 3), by name, and
zen as the paper has it.
"""


def exchange_of(name: str, density: float = 0.01) -> Exchange:
    """The lossless exchange of a scheme, the dense all-reduce, or an exchange of its
    own.

    These last take as many elements as ``density`` says, and keep what does not arrive.
    """
    if name == DENSE:
        return exchange_for(load("compress", "none")())
    if name in SCHEMES:
        return pair(nonzero(), SCHEMES[name])
    file, settings = (OWN | TEAMS)[name]
    return exchange_for(load("compress", file)(density=density, **settings))


def measure(settings: Json, report: Report) -> Json:
    """Seconds and bytes of every repeat, and each scheme's imbalance; all means are
    compared.
    """
    draws = IndexDraws(**settings["draws"])
    engine = open_engine()
    source_N = torch.zeros(draws.numel)
    indices_K = draws.taken(engine.rank, draws.pool()).long()
    source_N[indices_K] = torch.rand(len(indices_K)) + 0.5
    work_N = torch.empty_like(source_N)
    dense_N = torch.empty_like(source_N)
    sides = {
        name: TimedExchange(name, exchange_of(name, draws.density), work_N, engine)
        for name in (DENSE, *settings["schemes"])
    }

    def prepare(name: str) -> None:
        sides[name].forget()
        work_N.copy_(source_N)

    for name, side in sides.items():
        prepare(name)
        side()
        compare(name, side.kept(work_N).add_(work_N), dense_N)
    figures = in_turn(sides, settings["repeats"], report, prepare)
    for name, side in sides.items():
        figures[name]["imbalance"] = side.member.imbalance
    engine.close()
    return figures


def compare(name: str, mean_N: Tensor, dense_N: Tensor) -> None:
    """Holds every scheme to what the dense all-reduce, the first side, gave."""
    if name == DENSE:
        dense_N.copy_(mean_N)
    elif not torch.allclose(mean_N, dense_N, rtol=1e-5, atol=0.0):
        worst = float((mean_N - dense_N).abs().max())
        raise AssertionError(f"{name} is off the dense mean by {worst:.3g}")
