"""The planner zen: a scheme for each sparse tensor, from what all ranks know;
explained.
"""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.errors import InvalidSetting
from gradwire.exchange.planned import exchanges_of
from gradwire.exchange.sparse_schemes import DENSE as NO_SCHEME
from gradwire.exchange.sparse_schemes import schemes
from gradwire.planning.data.cluster import Cluster, Host
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.data.sparsity import Indices, SparsityProfile, TensorSparsity
from gradwire.planning.make_plan import plan as make_plan
from gradwire.planning.planner.mgwfbp import mgwfbp
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.planners import LAWS
from gradwire_lab.planner.zen import zen
from gradwire_lab.planning.index_sets import unit_sparsity
from gradwire_lab.planning.scheme_reasons import schemes_of
from tests.each import each
from tests.planning.profiles import CODECS, exact_cluster

ROWS, WIDTH = 2000, 32
SLOW = Cluster(num_ranks=8, rate_bytes_per_s=2.5e7, codecs=CODECS)


def index_sets(width: int = WIDTH) -> list[Indices]:
    """The non-zero units of eight gradients of the table."""
    draw = np.random.default_rng(0)
    weights = np.repeat(1 / np.arange(1, ROWS + 1), WIDTH // width)
    weights /= weights.sum()
    units = ROWS * WIDTH // width
    return [
        np.unique(draw.choice(units, 60 * WIDTH // width, p=weights)) for _ in range(8)
    ]


def sparsity(
    compressor: str | None = None, *, is_rows: bool = False
) -> SparsityProfile:
    width, units = (WIDTH, ROWS) if compressor is None else (1, ROWS * WIDTH)
    sets = index_sets(width)
    a_block = max(1, 256 // width)
    blocks = [np.unique(one // a_block) for one in sets]
    return SparsityProfile(
        source="made up",
        num_gradients=8,
        compressor=compressor,
        settings={} if compressor is None else {"density": 0.03},
        tensors=(
            TensorSparsity(
                name="table",
                units=unit_sparsity(sets, width, units),
                blocks=unit_sparsity(blocks, a_block * width, -(-units // a_block)),
                is_rows=is_rows,
            ),
        ),
    )


def profile(compressor: str | None = None, *, measured: bool = True) -> Profile:
    def layer(name: str, *shape: int) -> Layer:
        tensor = ProfiledTensor(name=name, shape=shape)
        return Layer(
            name=f"of {name}", tensors=(tensor,), forward_s=0.01, backward_s=0.02
        )

    made = Profile(
        model="words",
        source="made up",
        batch_size=1,
        layers=(layer("table", ROWS, WIDTH), layer("one", 64, 64), layer("two", 64, 8)),
    )
    return made.with_sparsity(sparsity(compressor)) if measured else made


def exchange_of(plan: Plan, tensor: str) -> str:
    return next(
        m.exchange for m in plan.messages if tensor in {c.tensor for c in m.chunks}
    )


@each("law", LAWS, ids=lambda law: law.__name__)
@each("compressor", [None, "dgc"])
def test_zen_keeps_every_law_with_a_measured_sparsity(
    law: object, compressor: str | None
) -> None:
    for cluster in (SLOW, exact_cluster(), Cluster(num_ranks=1, rate_bytes_per_s=1e9)):
        law(zen, profile(compressor), cluster)  # type: ignore[operator]


def test_a_sparse_tensor_takes_a_scheme_and_the_others_are_merged() -> None:
    found = make_plan("zen", profile(), SLOW)
    name = exchange_of(found, "table")
    made = found.exchanges[name]
    assert made.collective in {*schemes()} - {NO_SCHEME}
    assert name == f"{made.collective}: table"
    assert (made.compressor, made.settings["width"]) == ("nonzero", WIDTH)
    assert 0 < float(made.settings["expected_density"]) < 0.05
    assert not made.error_feedback
    assert exchange_of(found, "one") == exchange_of(found, "two") == DENSE
    assert [m.chunks[0].tensor for m in found.messages][-1] == "table", (
        "it is ready last"
    )
    assert set(exchanges_of(found)) == {DENSE, name}


def test_a_sparsifier_keeps_its_settings_and_its_error_feedback() -> None:
    made = zen(profile("dgc"), SLOW)
    (exchange,) = made.exchanges.values()
    assert (exchange.compressor, exchange.settings) == ("dgc", {"density": 0.03})
    assert exchange.error_feedback
    assert exchanges_of(made)


def test_without_sparsity_or_alone_all_is_dense() -> None:
    plain = profile(measured=False)
    assert zen(plain, SLOW).messages == mgwfbp(plain, SLOW).messages
    alone = zen(profile(), Cluster(num_ranks=1, rate_bytes_per_s=1e9))
    assert not alone.exchanges


def test_schemes_change_with_the_cluster() -> None:
    """Few ranks on a middling link take few rounds; many on a slow one send no row
    twice.
    """
    many = Cluster(num_ranks=128, rate_bytes_per_s=1e6, hop_s=1e-6)
    chosen = {exchange_of(zen(profile(), at), "table") for at in (SLOW, many)}
    assert chosen == {"sparcml: table", "zen: table"}


def test_a_plan_through_servers_is_simulated_without_any_value() -> None:
    """Of so few rows that clearing them alone would pay, the simulator knows no
    places.
    """
    many = Cluster(num_ranks=72, rate_bytes_per_s=1e6, hop_s=1e-6)
    made = zen(profile(), many)
    assert exchange_of(made, "table") == "zen: table"
    assert simulate(made, profile(), many).iteration_s > 0
    too_many = Cluster(num_ranks=2048, rate_bytes_per_s=1e6, hop_s=1e-6)
    with pytest.raises(
        InvalidSetting, match="must be at most 1024, since each rank is simulated"
    ):
        simulate(zen(profile(), too_many), profile(), too_many)


HOSTS = SLOW.model_copy(
    update={"host": Host(num_ranks=2, rate_bytes_per_s=1e9, hop_s=1e-5)}
)


@each("is_rows", [True, False])
def test_hosts_add_up_what_does_not_come_as_rows(is_rows: bool) -> None:
    """The prediction is what the simulator finds: of shares of sums, or of rows among
    all ranks.
    """
    words = profile(measured=False).with_sparsity(sparsity(is_rows=is_rows))
    ((at, choice),) = schemes_of(words, HOSTS).values()
    assert (at.world, at.numel) == (
        (8, ROWS * WIDTH) if is_rows else (4, ROWS * WIDTH // 2)
    )
    plan = zen(words, HOSTS)
    exchange = plan.exchanges[exchange_of(plan, "table")]
    assert float(exchange.settings["expected_density"]) == pytest.approx(
        at.units.density, rel=0.01
    )
    gathered = exchange.model_copy(update={"collective": "allgather_sparse"})
    plan = plan.model_copy(
        update={"exchanges": dict.fromkeys(plan.exchanges, gathered)}
    )
    by_name = {one.scheme: one.seconds for one in choice.predictions}
    for ranks in ("one", "all"):
        spans = simulate(plan, words, HOSTS, ranks=ranks).spans
        own = [one for one in spans if one.rank == 0 and one.name.startswith("table")]
        took_s = sum(one.duration_s for one in own if one.lane == "communication")
        assert by_name["allgather_sparse"] == pytest.approx(took_s, rel=0.01)


def test_a_hosts_sum_is_as_sparse_as_its_ranks_gradients_together() -> None:
    sets = index_sets()
    sums = [np.union1d(*sets[first : first + 2]) for first in range(0, 8, 2)]
    found = unit_sparsity(sets, WIDTH, ROWS).on_hosts(2, is_selected=False)
    true = unit_sparsity(sums, WIDTH, ROWS)
    assert found.num_units == ROWS // 2
    assert found.density == pytest.approx(true.density, rel=0.05)
    assert found.gamma(4) == pytest.approx(true.gamma(4), rel=0.05)
    assert found.is_extrapolated(8)
    assert not found.is_extrapolated(4)
    selected = unit_sparsity(sets, WIDTH, ROWS).on_hosts(2, is_selected=True)
    assert (selected.density, selected.gamma(4)) == (
        pytest.approx(unit_sparsity(sets, WIDTH, ROWS).density),
        pytest.approx(unit_sparsity(sets, WIDTH, ROWS).gamma(4)),
    )
