"""tune: a planner's settings found by Bayesian optimisation.

Source: ByteScheduler (SOSP 2019), section 4.3, which tunes partition and credit sizes
    so, and US-Byte, section 6.3, which finds its basic partition size S_p the same way.
Differences from the papers: the surrogate is optuna's tree-structured Parzen estimator,
    not a Gaussian process: most settings are whole numbers, of which a few are good.
    The first setting tried is the default, so the result is never worse than it.

``SEARCH`` in each planner's file says which values are searched. This module needs the
extra ``gradwire[tune]``.
"""

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from gradwire.contract.bounds import check_whole
from gradwire.errors import InvalidSetting, NotInstalled, invalid
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner_settings import Planner, Space, with_settings
from gradwire.planning.price import fewest_messages, iteration_s

Objective = Callable[[Plan], float]
"""Seconds that a plan takes, predicted or measured; less is better."""

NUM_RANDOM = 10
"""The number of random trials before the surrogate is asked."""

MOST_TRIALS = 10_000
"""The most trials that may be asked for; in each a plan is made and priced."""


def tune(
    planner: str | Planner,
    profile: Profile,
    cluster: Cluster,
    *,
    objective: Objective | None = None,
    trials: int = 40,
    seed: int = 0,
) -> Plan:
    """The best plan found in ``trials`` settings of ``planner``, the default ones among
    them.

    Among plans that tie (see ``fewest_messages``) it is the one of fewest messages.

    Settings bound by ``functools.partial`` stay; the others in the planner's ``SEARCH``
    are searched. Without an ``objective`` the predicted seconds of an iteration are
    minimised, which are the same on all ranks. An objective that measures must return
    the same number on every rank, or ranks choose different plans.

    Settings that the planner refuses for this model (because they cut it into too many
    messages, say) are not chosen. The same seed gives the same plan. Raises
    ``InvalidSetting`` for an objective whose result is no number, and ``NotInstalled``
    where optuna is missing, unless nothing is to be searched.
    """
    check_whole("trials", trials, "40 is usual", most=MOST_TRIALS)
    check_whole("seed", seed, "leave it out", least=0, most=2**32 - 1)
    chosen = with_settings(planner)
    space = search_space(chosen)
    if not space:
        return chosen(profile, cluster)
    score = partial(
        _seconds, objective or (lambda plan: iteration_s(plan, profile, cluster))
    )
    tried: dict[tuple[int, ...], tuple[float, Plan | None]] = {}
    with _optuna() as optuna:
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=NUM_RANDOM, multivariate=True
        )
        study = optuna.create_study(sampler=sampler)
        study.enqueue_trial(_defaults(chosen, space))
        for _ in range(trials):
            trial = study.ask()
            settings = {
                name: trial.suggest_int(
                    name, range_.low, range_.high, log=range_.logarithmic
                )
                for name, range_ in space.items()
            }
            key = tuple(settings.values())
            if key not in tried:
                plan = _made(partial(chosen, profile, cluster, **settings))
                tried[key] = (math.inf if plan is None else score(plan), plan)
            study.tell(trial, tried[key][0])
    default_s = next(iter(tried.values()))[0]
    found = [
        (s, plan) for s, plan in tried.values() if plan is not None and s <= default_s
    ]
    # which says why not
    return fewest_messages(found) if found else chosen(profile, cluster)


def _made(make: Callable[[], Plan]) -> Plan | None:
    """The plan of some settings; None where the planner refuses them for this model."""
    try:
        return make()
    except InvalidSetting:
        return None


def search_space(planner: Planner) -> Space:
    """The settings to search: the planner's ``SEARCH`` without those that are bound
    already.
    """
    bound: dict[str, Any] = {}
    while isinstance(planner, partial):
        bound = planner.keywords | bound
        planner = planner.func
    declared: Space = getattr(inspect.getmodule(planner), "SEARCH", {})
    return {name: values for name, values in declared.items() if name not in bound}


def _defaults(planner: Planner, space: Space) -> dict[str, int]:
    parameters = inspect.signature(planner).parameters
    return {name: parameters[name].default for name in space}


def _seconds(objective: Objective, plan: Plan) -> float:
    seconds = objective(plan)
    if isinstance(seconds, (int, float)) and not math.isnan(seconds):
        return float(seconds)
    raise invalid(
        f"the objective's result for a plan of {plan.planner!r}",
        seconds,
        "a number of seconds",
        "return math.inf for a plan that must not be chosen",
    )


@contextmanager
def _optuna() -> Iterator[Any]:
    """The module optuna, quiet about each trial for as long as it is used here."""
    try:
        optuna = importlib.import_module("optuna")
    except ModuleNotFoundError:
        raise NotInstalled("tuning", "optuna", "tune") from None
    loud = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(loud)
