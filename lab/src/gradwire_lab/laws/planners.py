"""The laws of planners: each takes any planner, the profile of a model and a
cluster.
"""

import torch

from gradwire.planning.data.check import check
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner_settings import Planner

from .tolerance import laws_in, must


def law_every_element_is_sent_once(
    planner: Planner, profile: Profile, cluster: Cluster
) -> None:
    """Every element of every gradient is in exactly one message, and all messages can
    start.

    To do: cover each tensor by ranges start:stop that meet without gap or overlap, the
    last one to its end.
    """
    plan = planner(profile, cluster)
    check(plan, profile)
    numels = {t.name: t.numel for layer in profile.layers for t in layer.tensors}
    sent = {
        name: torch.zeros(numel, dtype=torch.int32) for name, numel in numels.items()
    }
    for message in plan.messages:
        must(bool(message.chunks), "a message is empty")
        for chunk in message.chunks:
            must(
                0 <= chunk.start <= chunk.stop <= numels[chunk.tensor],
                f"{chunk} is no range",
            )
            sent[chunk.tensor][chunk.start : chunk.stop] += 1
    for name, counts_N in sent.items():
        counts = set(counts_N.tolist())
        must(counts <= {1}, f"{name}: elements sent {sorted(counts)} times")


def law_same_facts_same_plan(
    planner: Planner, profile: Profile, cluster: Cluster
) -> None:
    """A planner gives one plan for one profile and cluster, as every rank may plan for
    itself.

    To do: use neither clocks, random numbers without a fixed seed, nor what an earlier
    call left.
    """
    copy = Profile.parse(profile.model_dump_json())
    must(
        planner(profile, cluster) == planner(copy, cluster),
        "a second call, for a copy of the profile, gave another plan",
    )


def law_json_keeps_everything(
    planner: Planner, profile: Profile, cluster: Cluster
) -> None:
    """A plan that is written as JSON and read again is the same plan.

    To do: keep to finite numbers, texts and conditions in settings.
    """
    plan = planner(profile, cluster)
    back = Plan.parse(plan.to_json())
    must(back == plan, "read back from its JSON it is another plan")
    must(back.to_json() == plan.to_json(), "written a second time it is another JSON")


def law_plans_for_the_model(
    planner: Planner, profile: Profile, cluster: Cluster
) -> None:
    """The plan names the model of the profile that it was made from.

    To do: pass model=profile.model to Plan.
    """
    got = planner(profile, cluster).model
    must(
        got == profile.model,
        f"the plan names model {got!r}, the profile {profile.model!r}",
    )


LAWS = laws_in(globals())
