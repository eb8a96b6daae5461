"""plan: the root's ``gw.plan``: a planner by name or as a function."""

from typing import Any

from ..contract.registry import extension
from ..errors import invalid
from .data.check import check
from .data.cluster import Cluster
from .data.plan import Plan
from .data.profile import Profile
from .planner_settings import Planner, name_of, with_settings


def plan(
    planner: str | Planner,
    profile: Profile,
    cluster: Cluster,
    *,
    tune: bool = False,
    **settings: Any,
) -> Plan:
    """Makes a plan for a model on a cluster, and checks it.

    A plan says which gradients share a message, in which order messages are sent, and
    by which exchange each is sent.

    Args:
        planner: A planner's name (``gradwire list planner`` shows all), or a function
            from profile and cluster to a plan.
        profile: The model's layers, from ``gw.profile`` or ``gw.catalogue.load``.
        cluster: The ranks and their links.
        tune: Whether gradwire-lab searches for the best values of the settings that are
            not given. Default: False.
        **settings: The planner's settings.

    Returns:
        The plan, for ``gw.attach``, ``gw.simulate`` or ``Plan.save``.

    Raises:
        UnknownName: There is no such planner or setting.
        InvalidSetting: A value is not accepted, or the planner's plan does not fit
            ``profile``.

    >>> from gradwire import catalogue
    >>> ten_gbit = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> len(plan("wfbp", catalogue.load("vgg16"), ten_gbit).messages)
    16
    """
    if not isinstance(profile, Profile) or not isinstance(cluster, Cluster):
        raise invalid(
            "profile and cluster",
            f"{type(profile).__name__} and {type(cluster).__name__}",
            "a Profile and a Cluster, in this order",
            "read files with Profile.load and Cluster.load, models with "
            "gw.catalogue.load",
        )
    chosen = with_settings(planner, **settings)
    made = (
        extension("tune", "gw.plan(tune=True)").tune(chosen, profile, cluster)
        if tune
        else chosen(profile, cluster)
    )
    if not isinstance(made, Plan):
        raise invalid(
            f"what {name_of(chosen)} returns", made, "a Plan", "return a gw.Plan"
        )
    check(made, profile)
    return made
