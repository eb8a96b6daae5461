"""How long each exchange takes for one gradient on shaped links, beside torch's own
all-reduce.
"""

from dataclasses import asdict, dataclass, replace
from statistics import mean, median

from gradwire.cli.report.table import Row
from gradwire.contract.bounds import check_whole
from gradwire.exchange.two_level import TwoLevel
from gradwire.exchange.without_data import wire_bytes

from ..checks import check_counts, check_names
from ..figures import slowest, spread
from ..testbed.hosts import Testbed, open_hosts
from ..testbed.ranks import Json, Report, run_ranks
from ..testbed.wide_area import NEAR, WideArea
from .exchange_rank import EXCHANGES, ON_HOSTS, TORCH, exchange_for_row, message_spec

CONSTANT = frozenset({"num_hosts", "ranks_per_host", "link_bytes_per_s", "numel"})
"""Keys that have one value in all rows of a run."""


@dataclass(frozen=True, kw_only=True)
class ExchangeBench:
    """Settings of ``bench exchange``: a gradient of ``numel`` float32 elements.

    Where hosts have several ranks, each exchange is measured twice: among all ranks as
    if each were a host, and on hosts (see `hosts`).
    """

    hosts: int = 4
    ranks_per_host: int = 1
    rate_bytes_per_s: float = 62_500_000.0
    wide_area: WideArea = NEAR
    numel: int = 10_000_000
    repeats: int = 7
    only: tuple[str, ...] = ()
    """Exchanges to measure beside the dense one; all there are if it is empty."""

    def __post_init__(self) -> None:
        check_whole("hosts", self.hosts, "a single host sends nothing", least=2)
        check_counts(self, ranks_per_host=1, numel=1, repeats=1)
        check_names("exchange", self.only, EXCHANGES)

    @property
    def names(self) -> list[str]:
        """The exchanges that are measured, in turn."""
        flat = [*EXCHANGES]
        if self.only:
            flat = ["dense", *self.only]
        if self.ranks_per_host == 1:
            return flat
        return [n for name in dict.fromkeys(flat) for n in (name, name + ON_HOSTS)]


def run(bench: ExchangeBench, report: Report) -> list[Row]:
    """One row an exchange. A step's time is that of its slowest rank.

    Bytes are means over hosts' links. The floor is the busiest host's bytes over the
    link's rate, and None where links are not shaped or the exchange does not state its
    bytes.
    """
    settings = {**asdict(bench), "names": bench.names}
    testbed = Testbed(
        hosts=bench.hosts,
        ranks_per_host=bench.ranks_per_host,
        rate_bytes_per_s=bench.rate_bytes_per_s,
        wide_area=bench.wide_area,
    )
    with open_hosts(testbed) as hosts:
        results = run_ranks(hosts, f"{__name__}_rank", settings, report=report)
        shaped = hosts.shaped
    return [_row(bench, name, results, shaped) for name in results[0]]


def _row(
    bench: ExchangeBench,
    name: str,
    results: list[Json],
    shaped: bool,
) -> Row:
    seconds = slowest(results, name)
    stated = _stated_bytes("dense" if name == TORCH else name, bench)
    link_bytes_per_s = bench.wide_area.least(bench.rate_bytes_per_s)
    floor_s = max(stated) / link_bytes_per_s if shaped and stated else None
    # Where links are not shaped, every rank counts the bytes of all of them on the
    # loopback.
    sharers = 1 if shaped else bench.hosts  # hosts, as figures are of a host's link
    sent = [bytes_ / sharers for r in results for bytes_ in r[name]["sent_bytes"]]
    return {
        "name": name,
        "num_hosts": bench.hosts,
        "ranks_per_host": bench.ranks_per_host,
        "link_bytes_per_s": link_bytes_per_s if shaped else None,
        "numel": bench.numel,
        **spread(seconds),
        "speedup_vs_dense": median(slowest(results, "dense")) / median(seconds),
        "time_vs_torch": median(seconds) / median(slowest(results, TORCH)),
        "formula_bytes_per_step": mean(stated) if stated else None,
        "wire_bytes_per_step": mean(sent),
        "floor_s": floor_s,
        "time_vs_floor": median(seconds) / floor_s if floor_s else None,
    }


def _stated_bytes(name: str, bench: ExchangeBench) -> list[int]:
    """Bytes that each host sends, by the exchange's own formula; empty if it has none.

    Nor has an exchange among all ranks one, where some of them are on one host.
    """
    exchange = exchange_for_row(name, bench.ranks_per_host)
    per_host = bench.ranks_per_host
    if per_host > 1 and not isinstance(exchange, TwoLevel):
        return []
    spec = message_spec(bench.numel, per_host)
    shares = [spec]
    if isinstance(exchange, TwoLevel):
        shares = [exchange.share(replace(spec, rank=rank)) for rank in range(per_host)]
        exchange = exchange.inner
    each = [wire_bytes(exchange, share, bench.hosts) or [] for share in shares]
    return [sum(of_host) for of_host in zip(*each, strict=True)]
