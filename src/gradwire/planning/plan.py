"""plan: the root's ``gw.plan``: a planner by name or as a function, its settings checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ..data.check import check
from ..data.cluster import Cluster
from ..data.plan import Plan
from ..data.profile import Profile
from ..errors import UnknownName, invalid
from ..load import load

Planner = Callable[..., Plan]
"""``(profile, cluster, *, settings) -> Plan``, pure: the same facts give the same plan."""


def plan(
    planner: str | Planner,
    profile: Profile,
    cluster: Cluster,
    *,
    tune: bool = False,
    **settings: Any,
) -> Plan:
    """The plan of a planner for a model and a cluster, checked.

    ``planner`` is a name (``gradwire list planner`` shows them) or a function of your own; its
    settings are given by name. With ``tune`` those left out are searched for under the model
    (``gradwire.planning.tune.tune``), otherwise they have their defaults.

    Raises ``UnknownName`` for a planner or a setting there is not, ``InvalidSetting`` for a value
    that is not accepted, and for a plan that is not sound for ``profile``.

    >>> from gradwire import catalogue
    >>> ten_gbit = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> plan("bytescheduler", catalogue.load("vgg16"), ten_gbit, credit=1).credit
    1
    """
    if not isinstance(profile, Profile) or not isinstance(cluster, Cluster):
        given = f"{type(profile).__name__} and {type(cluster).__name__}"
        raise invalid(
            "profile and cluster",
            given,
            "a Profile and a Cluster, in this order",
            "read files with Profile.load and Cluster.load, models with gradwire.catalogue.load",
        )
    chosen = with_settings(planner, **settings)
    if tune:
        from .tune import tune as search

        made = search(chosen, profile, cluster)
    else:
        made = chosen(profile, cluster)
    if not isinstance(made, Plan):
        accepted = "a Plan, as every planner gives"
        raise invalid(f"what {name_of(chosen)} returns", made, accepted, "return one")
    check(made, profile)
    return made


def with_settings(planner: str | Planner, **settings: Any) -> Planner:
    """The planner, found by name if need be, with these settings bound; refuses unknown ones."""
    found: Planner = load("planner", planner) if isinstance(planner, str) else planner
    if not callable(found):
        raise invalid("planner", planner, "a planner's name or a function", "write 'usbyte'")
    known = settings_of(found)
    for name in settings:
        if known == []:
            raise invalid(name_of(found), name, "called without settings", "leave it out")
        if known is not None and name not in known:
            raise UnknownName(f"setting of {name_of(found)}", name, known)
    return partial(found, **settings) if settings else found


def settings_of(planner: Planner) -> list[str] | None:
    """Names of a planner's settings; None where it takes any."""
    parameters = inspect.signature(planner).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def name_of(planner: Planner) -> str:
    """A planner's name in errors and tables: that of its function."""
    while isinstance(planner, partial):
        planner = planner.func
    return getattr(planner, "__name__", type(planner).__name__)
