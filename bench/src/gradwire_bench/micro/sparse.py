"""How long each scheme takes to average one sparse gradient on shaped links, beside the
dense one.

All sides take their turns in one run, on the same gradients: index sets of stated
density, overlap and skew (``draws``). What the sets turned out to be is in every row.
"""

from dataclasses import asdict, dataclass
from statistics import mean, median

from torch import Tensor

from gradwire.cli.report.table import Row
from gradwire.collective.steps.push_pull import PushPull
from gradwire.compress.nonzero import nonzero
from gradwire.contract.bounds import check_whole
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.without_data import expected_bytes
from gradwire_lab.exchange.bytes_of_sets import bytes_of, volumes

from ..checks import check_counts, check_names
from ..figures import slowest, spread
from ..testbed.hosts import Testbed, open_hosts
from ..testbed.ranks import Json, Report, run_ranks
from ..testbed.wide_area import NEAR, WideArea
from .draws import IndexDraws, SetMeasures
from .sparse_rank import DENSE, OWN, SCHEMES, TEAMS, exchange_of

CONSTANT = frozenset(
    {
        "num_hosts",
        "link_bytes_per_s",
        "numel",
        "density",
        "overlap",
        "densification",
        "skewness",
    }
)
"""Keys that have one value in all rows of a run."""


@dataclass(frozen=True, kw_only=True)
class SparseBench:
    """Settings of ``bench sparse``: one float32 gradient on ``draws.world`` hosts."""

    draws: IndexDraws
    rate_bytes_per_s: float = 25_000_000.0
    wide_area: WideArea = NEAR
    repeats: int = 7
    schemes: tuple[str, ...] = (*SCHEMES, *OWN)
    """Schemes that are measured beside the dense all-reduce."""

    def __post_init__(self) -> None:
        check_whole("hosts", self.draws.world, "a single host sends nothing", least=2)
        check_counts(self, repeats=1)
        check_names("scheme", self.schemes, (*SCHEMES, *OWN, *TEAMS))
        for name in self.schemes:
            if name in TEAMS:  # refuses teams that do not divide the hosts
                exchange_of(name).init(
                    TensorSpec("grad", self.draws.numel), self.draws.world
                )


def run(bench: SparseBench, report: Report) -> list[Row]:
    """One row a scheme. A step's time is that of its slowest rank; bytes are means over
    ranks.

    ``bound_s`` is what the scheme's own bytes take on the link: of push-pull schemes
    (n-1)/n of the bytes that a rank pushes and pulls, of others the bytes that the
    busiest rank sends. It is None where links are not shaped.
    """
    world = bench.draws.world
    testbed = Testbed(
        hosts=world,
        rate_bytes_per_s=bench.rate_bytes_per_s,
        wide_area=bench.wide_area,
    )
    with open_hosts(testbed) as hosts:
        results = run_ranks(hosts, f"{__name__}_rank", asdict(bench), report=report)
        shaped = hosts.shaped
    pool = bench.draws.pool()
    sets = [bench.draws.taken(rank, pool) for rank in range(world)]
    return [
        _row(bench, name, results, sets, shaped) for name in (DENSE, *bench.schemes)
    ]


def _row(
    bench: SparseBench,
    name: str,
    results: list[Json],
    sets: list[Tensor],
    shaped: bool,
) -> Row:
    seconds = slowest(results, name)
    stated = _stated(bench, name, sets)
    link_bytes_per_s = bench.wide_area.least(bench.rate_bytes_per_s)
    bound_s = _bound_bytes(bench, name, sets) / link_bytes_per_s if shaped else None
    imbalance = results[0][name]["imbalance"]
    measures = SetMeasures.of(sets, bench.draws.numel)
    # Where links are not shaped, every rank counts the bytes of all of them on the
    # loopback.
    sharers = 1 if shaped else bench.draws.world
    sent = [
        bytes_ / sharers for result in results for bytes_ in result[name]["sent_bytes"]
    ]
    return {
        "name": name,
        "num_hosts": bench.draws.world,
        "link_bytes_per_s": link_bytes_per_s if shaped else None,
        "numel": bench.draws.numel,
        "density": len(sets[0]) / bench.draws.numel,
        "overlap": measures.overlap,
        "densification": measures.densification,
        "skewness": measures.skewness,
        **spread(seconds),
        "speedup_vs_dense": median(slowest(results, DENSE)) / median(seconds),
        "formula_bytes_per_step": mean(stated),
        "wire_bytes_per_step": mean(sent),
        "bound_s": bound_s,
        "time_vs_bound": median(seconds) / bound_s if bound_s else None,
        "push_imbalance": imbalance[0] if imbalance else None,
        "pull_imbalance": imbalance[1] if imbalance else None,
    }


def _stated(bench: SparseBench, name: str, sets: list[Tensor]) -> list[int]:
    """Bytes that each rank sends, by the scheme's formula."""
    spec = TensorSpec("grad", bench.draws.numel)
    if name in SCHEMES:
        return bytes_of(SCHEMES[name], nonzero(), spec, sets) or []
    exchange = exchange_of(name, bench.draws.density)
    return expected_bytes(exchange, spec, len(sets)) or []


def _bound_bytes(bench: SparseBench, name: str, sets: list[Tensor]) -> float:
    """Bytes that no rank's link is spared."""
    scheme = SCHEMES.get(name)
    world = len(sets)
    if not isinstance(scheme, PushPull):
        return max(_stated(bench, name, sets))
    spec = TensorSpec("grad", bench.draws.numel)
    pushed, pulled = volumes(scheme, nonzero(), spec, sets)
    return (world - 1) / world * (mean(pushed) + sum(pulled))
