"""Compressors, one a file; ``topk.py`` defines the class ``gw.compress.topk``.

``attach``, planners and users find them by name. An algorithm with helpers of its own
may be a folder. A compressor knows one rank's gradient, and no process group.
"""

from typing import TYPE_CHECKING, Any

from ..contract.registry import make_registry

if TYPE_CHECKING:
    from .cast16 import cast16 as cast16
    from .fp8 import fp8 as fp8
    from .int8 import int8 as int8
    from .none import none as none
    from .nonzero import nonzero as nonzero
    from .onebit import onebit as onebit
    from .powersgd import powersgd as powersgd
    from .topk import topk as topk
    from .uniform import uniform as uniform

    def __getattr__(name: str) -> Any: ...  # the algorithms of other packages


make_registry(__name__)
