"""Plans whose messages are encoded within the backward pass end in the same bits."""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.data.plan import Plan
from gradwire.planner.ssfusion import ssfusion
from tests.runtime import plans
from tests.runtime.ranks import Ranks
from tests.runtime.test_plans import LOSSY, NUM_STEPS, OPTIMIZERS
from tests.runtime.training import Net, digest, train

pytestmark = pytest.mark.multi


def _inline(plan: Plan, inline: bool) -> Plan:
    """The plan with every message encoded within the backward pass, or none."""
    messages = tuple(
        m.model_copy(update={"inline": tuple({c.tensor: 0 for c in m.chunks}) if inline else ()})
        for m in plan.messages
    )
    return plan.model_copy(update={"messages": messages})


def inline_or_not(rank: int, world: int, seed: int) -> list[tuple[str, set[str]]]:
    """The bits after a few steps, and the lanes that encoded."""
    found = []
    for inline in (False, True):
        net = Net()
        plan = _inline(plans.through(plans.drawn(seed), "lossy", LOSSY), inline)
        optimizer = OPTIMIZERS["momentum"](net)
        handle = gw.attach(net, plan, optimizer=optimizer)
        train(net, optimizer, rank, range(NUM_STEPS))
        lanes = {span.lane for span in handle.trace().spans if span.name == "encode"}
        handle.detach()
        found.append((digest(net), lanes))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_inline_encodes_end_in_the_same_bits(seed: int, two: Ranks) -> None:
    """Within the backward pass (with ``overlap_forward`` too, seed 1) or on the compute lane."""
    for (beside, lanes), (within, inline_lanes) in two.run(inline_or_not, seed):
        assert within == beside
        assert (lanes, inline_lanes) == ({"compute"}, {"backward"})


def tensor_by_tensor(rank: int, world: int) -> list[str]:
    """The bits after a few steps of ssfusion's groups, as planned and on the compute lane."""
    profile = plans.profile_of_model(Net())
    found = []
    for variant in ("naive", "i"):
        plan = ssfusion(profile, plans.CLUSTER, variant=variant, density=0.3, floor=0.1)
        assert any(message.inline for message in plan.messages)
        for chosen in (plan, _inline(plan, inline=False)):
            net = Net()
            optimizer = OPTIMIZERS["momentum"](net)
            handle = gw.attach(net, chosen, optimizer=optimizer)
            train(net, optimizer, rank, range(NUM_STEPS))
            handle.detach()
            found.append(digest(net))
    return found


def test_ssfusion_is_carried_out_inline_or_not(two: Ranks) -> None:
    for naive, beside, interleaved, interleaved_beside in two.run(tensor_by_tensor):
        assert naive == beside
        assert interleaved == interleaved_beside
