"""Local steps of a period, priced beside a plan."""

from __future__ import annotations

import pytest

from gradwire.contract.units import format_seconds
from gradwire.errors import InvalidSetting
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.periods import exchange_s, period_sentences
from gradwire.planning.planner.auto import auto
from gradwire.planning.planner.ddp import ddp
from gradwire.planning.price import iteration_s
from tests.planning.profiles import exact_cluster

LINE = LineFit(alpha_s=2e-5, per_unit_s=4e-10)
SLOW = Cluster(
    num_ranks=4,
    rate_bytes_per_s=12.5e6,
    codecs={"uniform": CodecFit(encode=LINE, decode=LINE, merge=LINE)},
)
RESNET = catalogue.load("resnet50")


def test_dense_pseudo_gradients_take_their_bytes_over_the_link() -> None:
    """On a ring of two a rank sends what the model has, and nothing is computed meanwhile."""
    link = exact_cluster(hop_s=0.0, rate=2.0**28)
    assert exchange_s(RESNET, link) == pytest.approx(RESNET.size_bytes / 2**28)


def test_a_step_shares_the_exchange_with_its_period() -> None:
    plan = auto(RESNET, SLOW)
    words = period_sentences(plan, RESNET, SLOW, 20)
    compute_s, dense_s = RESNET.forward_s + RESNET.backward_s, exchange_s(RESNET, SLOW)
    assert len(words) == 3
    assert f"{format_seconds(compute_s + dense_s / 20)} a step" in words[1]
    assert "through uniform" in words[2]
    coded_s = exchange_s(RESNET, SLOW, next(iter(plan.exchanges.items())))
    assert f"{format_seconds(compute_s + coded_s / 20)} a step" in words[2]
    assert coded_s < dense_s / 5


def test_the_least_period_that_is_faster_is_told() -> None:
    plan = ddp(RESNET, SLOW)
    (_, words) = period_sentences(plan, RESNET, SLOW, 20)
    least = int(words.split("from a period of ")[1].split()[0])
    compute_s, alone_s = RESNET.forward_s + RESNET.backward_s, exchange_s(RESNET, SLOW)
    plan_s = iteration_s(plan, RESNET, SLOW)
    assert compute_s + alone_s / least <= plan_s < compute_s + alone_s / max(1, least - 1) or (
        least == 1
    )
    alone = Cluster(num_ranks=1, rate_bytes_per_s=1e9)
    assert "no period is faster" in period_sentences(ddp(RESNET, alone), RESNET, alone, 5)[1]


def test_a_period_is_a_number_of_steps() -> None:
    with pytest.raises(InvalidSetting, match="period"):
        period_sentences(ddp(RESNET, SLOW), RESNET, SLOW, 0)
