"""Planners, one in each file: pure functions ``(profile, cluster, *, settings) -> Plan``.

``gradwire.planning.planner.usbyte`` is the function that ``usbyte.py`` defines. A plan is data: runtime and
simulator read the same one. What planners share lies in ``planning``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...contract.registry import make_registry

if TYPE_CHECKING:
    from gradwire_lab.planner.cupcake import cupcake as cupcake
    from gradwire_lab.planner.espresso import espresso as espresso
    from gradwire_lab.planner.omgs import omgs as omgs
    from gradwire_lab.planner.selective_fusion import selective_fusion as selective_fusion

    from .auto import auto as auto
    from .bytescheduler import bytescheduler as bytescheduler
    from .ddp import ddp as ddp
    from .mgwfbp import mgwfbp as mgwfbp
    from .secopa import secopa as secopa
    from .ssfusion import ssfusion as ssfusion
    from .usbyte import usbyte as usbyte
    from .usbyte_extended import usbyte_extended as usbyte_extended
    from .wfbp import wfbp as wfbp
    from .zen import zen as zen

make_registry(__name__)
