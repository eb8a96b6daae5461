"""One iteration of a plan with every rank played, and none that stands for all."""

from collections.abc import Callable, Sequence

from gradwire.contract import Exchange
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.orders import orders_of
from gradwire.exchange.without_data import record
from gradwire.planning.simulation.clock import Demand, Timing, at_launch
from gradwire.planning.simulation.events import Timetable, Traffic, play
from gradwire.planning.simulation.representative import alone
from gradwire.planning.simulation.supersteps import Superstep, Tariff, supersteps_of


def all_ranks(
    demand: Demand,
    slower: Sequence[float] = (),
    carry: Callable[[Traffic], Timetable] = play,
) -> list[Timing]:
    """The times on every rank; the rest is as for ``Iteration.timings``."""
    cluster = demand.iteration.cluster
    known = {}
    tariffs = {name: demand.tariff(name) for name in demand.exchanges}
    every: list[list[tuple[Superstep, ...]]] = [[] for _ in range(cluster.num_ranks)]
    orders = orders_of(message.exchange for message in demand.plan.messages)
    for message, spec, order in zip(
        demand.plan.messages, demand.specs, orders, strict=True
    ):
        name = message.exchange
        exchange = demand.exchanges[name]
        tariff = tariffs[name]
        own_order = 0
        if depends_on_order(exchange, spec, tariff):
            own_order = order
        # Messages of a size and exchange are alike but for their order.
        key = (name, spec, own_order)
        if name in demand.of_rows and cluster.ranks_per_host > 1:
            # Hosts' links are in the tariff, which is that of ranks that have one each.
            known[key] = [alone(exchange, spec, tariff)] * cluster.num_ranks
        elif key not in known:
            known[key] = supersteps_of(exchange, spec, tariff, own_order)
        for messages, supersteps in zip(every, known[key], strict=True):
            messages.append(at_launch(message, supersteps))
    return demand.iteration.timings(every, slower, carry)


def depends_on_order(exchange: Exchange, spec: TensorSpec, tariff: Tariff) -> bool:
    """Whether verbs depend on the message's order: see ``Member.order``."""
    return (
        tariff.num_ranks > 1
        and record(exchange, spec, 0, tariff.num_ranks).is_of_its_order
    )
