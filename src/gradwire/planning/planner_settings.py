"""Settings of a planner, by name or as a function, and how they are bound to it."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..contract.registry import load
from ..errors import UnknownName, invalid
from .data.plan import Plan

# ---- the settings of a planner -------------------------------------------------------


Planner = Callable[..., Plan]
"""``(profile, cluster, *, settings) -> Plan``, pure: equal facts give an equal plan."""


def with_settings(planner: str | Planner, **settings: Any) -> Planner:
    """The planner, found by name if need be, with these settings bound.

    Refuses unknown ones.
    """
    function: Planner = (
        load("planner", planner) if isinstance(planner, str) else planner
    )
    if not callable(function):
        raise invalid(
            "planner", planner, "a planner's name or a function", "write 'auto'"
        )
    known = settings_of(function)
    for name in settings:
        if known == []:
            raise invalid(
                name_of(function), name, "called without settings", "leave it out"
            )
        if known is not None and name not in known:
            raise UnknownName(f"setting of {name_of(function)}", name, known)
    return partial(function, **settings) if settings else function


def settings_of(planner: Planner) -> list[str] | None:
    """Names of a planner's settings; None where it takes any.

    Raises ``InvalidSetting`` for a function that takes no profile and cluster.
    """
    try:
        signature = inspect.signature(planner)
        signature.bind_partial(None, None)
    except (
        TypeError,
        ValueError,
    ):  # too few parameters, or a built-in function that names none
        raise invalid(
            "planner",
            name_of(planner),
            "a planner's name, or a function (profile, cluster, *, settings)",
            "write 'auto'",
        ) from None
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def name_of(planner: Planner) -> str:
    """A planner's name in errors and tables: that of its function."""
    while isinstance(planner, partial):
        planner = planner.func
    return getattr(planner, "__name__", type(planner).__name__)


# ---- values of a setting that are worth trying: a planner's ``SEARCH`` ---------------


class WholeNumbers(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both included.

    On a ``logarithmic`` scale 1 MiB is as far from 2 MiB as from 512 KiB, which suits
    sizes.
    """

    low: int
    high: int
    logarithmic: bool = False


Space = dict[str, WholeNumbers]
"""The values to try of each setting of one planner, by the setting's name."""

SIZES = WholeNumbers(2**16, 2**27, logarithmic=True)
"""Sizes in bytes, from 64 KiB to 128 MiB."""
