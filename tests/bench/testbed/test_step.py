"""A step's own work is found again, and is the same on every rank."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.runtime.engine.engine import Engine, figures_of_all
from gradwire.runtime.liveness.membership import join
from gradwire_bench.testbed import step
from gradwire_bench.testbed.step import SmallModel, step_line
from tests.runtime.ranks import Ranks

CARRIED = LineFit(alpha_s=2e-4, per_unit_s=0.0)
CLUSTER = Cluster(num_ranks=2, rate_bytes_per_s=1e8, processors=CARRIED)


def test_a_steps_work_is_what_attach_adds_without_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks, of which the second takes twice as long."""
    attached: list[Any] = []

    def attach(model: Any, exchange: Any) -> Any:
        attached.append(model)
        return SimpleNamespace(detach=lambda: None)

    def busy_s(own: SmallModel) -> float:
        work_s = 1e-3 + 1e-5 * len(own.numels) + CARRIED.alpha_s
        return 5e-3 + any(one is own.model for one in attached) * work_s

    monkeypatch.setattr(step, "attach", attach)
    monkeypatch.setattr(SmallModel, "busy_s", busy_s)
    line = step_line(lambda own: [[*own], [2 * own_s for own_s in own]], CLUSTER)
    assert line is not None
    assert line.alpha_s == pytest.approx(1.5e-3)
    assert line.per_unit_s == pytest.approx(1.5e-5)
    assert len(attached) == len(step.NUM_LAYERS)


def test_without_the_messages_own_work_there_is_no_line() -> None:
    alone = CLUSTER.model_copy(update={"processors": None})
    assert step_line(lambda own: [[*own]] * 2, alone) is None


def measured(rank: int, world: int) -> LineFit | None:
    engine = Engine(
        join(None),
        num_channels=1,
        timeout=timedelta(seconds=60),
        on_span=lambda span: None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "NUM_STEPS", 2)
        patch.setattr(step, "ROUNDS", 1)
        patch.setattr(step, "NUM_LAYERS", (1, 2, 4))
        line = step_line(partial(figures_of_all, engine), CLUSTER)
    engine.close()
    return line


@pytest.mark.multi
def test_real_ranks_find_the_same_line(two: Ranks) -> None:
    first, second = two.run(measured)
    assert first == second
