"""Compressors, one algorithm a file; ``gw.compress.topk`` is the class that ``topk.py`` defines.

An algorithm with helpers of its own is a folder: ``deft``, ``oktopk``, ``selective``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..load import make_registry

if TYPE_CHECKING:
    from .adacomp import adacomp as adacomp
    from .cast16 import cast16 as cast16
    from .cltk import cltk as cltk
    from .deft import deft as deft
    from .dgc import dgc as dgc
    from .fp8 import fp8 as fp8
    from .gaussiank import gaussiank as gaussiank
    from .graddrop import graddrop as graddrop
    from .hardthreshold import hardthreshold as hardthreshold
    from .int8 import int8 as int8
    from .lossless import lossless as lossless
    from .none import none as none
    from .nonzero import nonzero as nonzero
    from .oktopk import oktopk as oktopk
    from .onebit import onebit as onebit
    from .powersgd import powersgd as powersgd
    from .qsgd import qsgd as qsgd
    from .randomk import randomk as randomk
    from .redsync import redsync as redsync
    from .selective import selective as selective
    from .sharded_dgc import sharded_dgc as sharded_dgc
    from .sidco import sidco as sidco
    from .spardl import spardl as spardl
    from .tbq import tbq as tbq
    from .terngrad import terngrad as terngrad
    from .threelc import threelc as threelc
    from .topk import topk as topk
    from .uniform import uniform as uniform

make_registry(__name__)
