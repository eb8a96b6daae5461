"""Methods of training by name: a compressor, adapted or not, or a recipe of several
parts.

A recipe is a line in ``RECIPES``. It may change the task's optimizer, where the
exchange does a part of the optimizer's work.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Exchange
from gradwire.contract.registry import names
from gradwire.errors import UnknownName
from gradwire.exchange.by_name import algorithm_by_name, exchange_for
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.pair import pair
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.compress.dgc import dgc
from gradwire_lab.exchange.adapt import adapt
from gradwire_lab.exchange.density_warmup import with_density_warmup
from gradwire_lab.exchange.momentum import with_momentum_correction
from gradwire_lab.exchange.warmup import with_warmup

from ..workloads.task import TrainingTask
from ..workloads.train import without_momentum

DENSE = "dense"
"""The name of uncompressed training, which others are compared with."""


@dataclass(frozen=True)
class Recipe:
    """The exchange of a method, and the task with the optimizer behind it."""

    task: TrainingTask
    exchange: Exchange


Method = Callable[[TrainingTask, int], Recipe]
"""A function of the task and the number of steps that it is trained for."""


def method(name: str) -> Method:
    """The method of a name: ``DENSE``, one of ``RECIPES``, or a compressor.

    A compressor has its defaults or settings behind it, as in ``topk(density=0.02)``.
    With ``adapt:`` before it its settings are chosen layer by layer. Raises
    ``InvalidSetting`` for any other name.
    """
    if name in RECIPES:
        return RECIPES[name]
    text = name.removeprefix("adapt:")
    called, settings = _called(text)
    if called not in names("compress"):
        raise UnknownName("method", name, (*RECIPES, *names("compress")))
    algorithm = algorithm_by_name(called, settings)
    if name != text:
        return lambda task, steps: Recipe(
            task, adapt(algorithm, every=max(1, steps // 10))
        )
    return lambda task, num_steps: Recipe(task, exchange_for(algorithm))


def _called(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings in ``name(setting=value, ...)``, or in the name
    alone.
    """
    try:
        called = ast.parse(text, mode="eval").body
        if (
            isinstance(called, ast.Call)
            and isinstance(called.func, ast.Name)
            and not called.args
        ):
            words = {
                str(word.arg): ast.literal_eval(word.value) for word in called.keywords
            }
            return called.func.id, words
    except (SyntaxError, ValueError):
        pass
    return text, {}


def _dense(task: TrainingTask, num_steps: int) -> Recipe:
    return Recipe(task, exchange_for(none()))


def _onebit_warmup(task: TrainingTask, num_steps: int) -> Recipe:
    """The first tenth of the steps is dense."""
    return Recipe(task, with_warmup(onebit(), max(1, num_steps // 10)))


def _topk_warmup(task: TrainingTask, num_steps: int) -> Recipe:
    """Each density above top-k's own has a twentieth of the steps."""
    return Recipe(
        task, with_density_warmup(topk(), steps_per_stage=max(1, num_steps // 20))
    )


def _topk_momentum(task: TrainingTask, num_steps: int) -> Recipe:
    """Velocities are sent, unmasked, and SGD, which it needs, has no momentum of its
    own.
    """
    return Recipe(
        without_momentum(task), with_momentum_correction(topk(), masking=False)
    )


def _dgc_ring(task: TrainingTask, num_steps: int) -> Recipe:
    """Every hop of a ring selects again."""
    return Recipe(task, with_error_feedback(pair(dgc(), casync_ring())))


RECIPES: dict[str, Method] = {
    DENSE: _dense,
    "onebit-warmup": _onebit_warmup,
    "topk-warmup": _topk_warmup,
    "topk-momentum": _topk_momentum,
    "dgc-casync_ring": _dgc_ring,
}
"""Recipes by name: what is more than one compressor with its defaults."""
