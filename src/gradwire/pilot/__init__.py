"""Pilots, one in each file: they choose a plan while the model trains.

``gradwire.pilot.auto`` is the class that ``auto.py`` defines; ``attach(model, "auto")``
asks for it. A pilot knows planners, measurements and the step's controls, and no single
exchange.
"""

from typing import TYPE_CHECKING

from ..contract.registry import make_registry

if TYPE_CHECKING:
    from .auto import auto as auto
    from .by_planner import by_planner as by_planner

make_registry(__name__)
