"""Planners, one in each file or folder: pure functions
``(profile, cluster, *, settings) -> Plan``.

The attribute ``auto`` is the function that the folder ``auto`` defines. A plan is data:
runtime and simulator read the same plan. A planner's own parts are in its folder. Parts
that several planners share are in the room above.
"""

from typing import TYPE_CHECKING, Any

from ...contract.registry import make_registry

if TYPE_CHECKING:
    from .auto import auto as auto
    from .ddp import ddp as ddp
    from .mgwfbp import mgwfbp as mgwfbp
    from .wfbp import wfbp as wfbp

    def __getattr__(name: str) -> Any: ...  # the algorithms of other packages


make_registry(__name__)
