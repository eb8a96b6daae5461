"""The planner zen: a scheme for each sparse tensor, from what all ranks know; explained."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.errors import InvalidSetting
from gradwire.exchange.sparse_schemes import DENSE as NO_SCHEME
from gradwire.exchange.sparse_schemes import schemes
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.data.sparsity import SparsityProfile, TensorSparsity
from gradwire.planning.exchanges import exchanges_of
from gradwire.planning.make_plan import plan as make_plan
from gradwire.planning.planner.mgwfbp import mgwfbp
from gradwire.planning.planner.zen import zen
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.planners import LAWS
from gradwire_lab.planning.explain import explain
from gradwire_lab.planning.index_sets import unit_sparsity
from tests.each import each
from tests.planning.profiles import CODECS, exact_cluster

ROWS, WIDTH = 2000, 32
SLOW = Cluster(num_ranks=8, rate_bytes_per_s=2.5e7, codecs=CODECS)


def sparsity(compressor: str | None = None) -> SparsityProfile:
    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, ROWS + 1)
    width, units = (WIDTH, ROWS) if compressor is None else (1, ROWS * WIDTH)
    weights = np.repeat(weights, WIDTH // width)
    weights /= weights.sum()
    sets = [np.unique(draw.choice(units, 60 * WIDTH // width, p=weights)) for _ in range(8)]
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
            ),
        ),
    )


def profile(compressor: str | None = None, *, measured: bool = True) -> Profile:
    def layer(name: str, *shape: int) -> Layer:
        tensor = ProfiledTensor(name=name, shape=shape)
        return Layer(name=f"of {name}", tensors=(tensor,), forward_s=0.01, backward_s=0.02)

    made = Profile(
        model="words",
        source="made up",
        batch_size=1,
        layers=(layer("table", ROWS, WIDTH), layer("one", 64, 64), layer("two", 64, 8)),
    )
    return made.with_sparsity(sparsity(compressor)) if measured else made


def exchange_of(plan: Plan, tensor: str) -> str:
    return next(m.exchange for m in plan.messages if tensor in {c.tensor for c in m.chunks})


@each("law", LAWS, ids=lambda law: law.__name__)
@each("compressor", [None, "dgc"])
def test_laws_with_a_measured_sparsity(law: object, compressor: str | None) -> None:
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
    assert [m.chunks[0].tensor for m in found.messages][-1] == "table", "it is ready last"
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
    """Few ranks on a middling link take few rounds; many on a slow one send no row twice."""
    many = Cluster(num_ranks=128, rate_bytes_per_s=1e6, hop_s=1e-6)
    chosen = {exchange_of(zen(profile(), at), "table") for at in (SLOW, many)}
    assert chosen == {"sparcml: table", "zen: table"}


def test_a_plan_through_servers_is_simulated_without_any_value() -> None:
    """Of so few rows that clearing them alone would pay, the simulator knows no places."""
    many = Cluster(num_ranks=72, rate_bytes_per_s=1e6, hop_s=1e-6)
    made = zen(profile(), many)
    assert exchange_of(made, "table") == "zen: table"
    assert simulate(made, profile(), many).iteration_s > 0
    too_many = Cluster(num_ranks=2048, rate_bytes_per_s=1e6, hop_s=1e-6)
    with pytest.raises(InvalidSetting, match="must be at most 1024, since each rank is simulated"):
        simulate(zen(profile(), too_many), profile(), too_many)


def test_explained_in_words() -> None:
    told = explain(zen(profile("dgc"), SLOW), profile("dgc"), SLOW)
    (about,) = [sentence for sentence in told if sentence.startswith("table: ")]
    assert "the runner-up is" in about
    assert "The sparse gradient is the part that dgc takes." in told
