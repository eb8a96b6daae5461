"""Compressors, one algorithm a file; ``gw.compress.topk`` is the class that ``topk.py`` defines.

May import: errors, units, spec, payload, contract, load, kernels, collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..load import make_registry

if TYPE_CHECKING:
    from .cast16 import cast16 as cast16
    from .none import none as none
    from .onebit import onebit as onebit
    from .topk import topk as topk

make_registry(__name__)
