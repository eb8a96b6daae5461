"""Methods of training by name: a compressor with its defaults, or a recipe of several parts.

A recipe is a line in ``RECIPES``. It may change the task's optimizer, where the exchange does a
part of the optimizer's work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..compress.none import none
from ..contract import Exchange
from ..errors import invalid
from ..exchange import exchange_for
from ..load import load, names
from ..workloads.task import TrainingTask

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
    """The method of a name: ``DENSE``, one of ``RECIPES``, or a compressor with its defaults.

    Raises ``InvalidSetting`` for any other name.
    """
    if name in RECIPES:
        return RECIPES[name]
    if name not in names("compress"):
        raise invalid("method", name, ", ".join((*RECIPES, *names("compress"))), "name another")
    algorithm = load("compress", name)()
    return lambda task, num_steps: Recipe(task, exchange_for(algorithm))


RECIPES: dict[str, Method] = {
    DENSE: lambda task, num_steps: Recipe(task, exchange_for(none())),
}
"""Recipes by name: what is more than one compressor with its defaults."""
