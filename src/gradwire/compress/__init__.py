"""Compressors, one algorithm a file; ``gw.compress.topk`` is the class that ``topk.py`` defines.

An algorithm with helpers of its own is a folder: ``deft``, ``oktopk``, ``selective``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..contract.registry import make_registry

if TYPE_CHECKING:
    from gradwire_lab.compress.adacomp import adacomp as adacomp
    from gradwire_lab.compress.cltk import cltk as cltk
    from gradwire_lab.compress.gaussiank import gaussiank as gaussiank
    from gradwire_lab.compress.graddrop import graddrop as graddrop
    from gradwire_lab.compress.hardthreshold import hardthreshold as hardthreshold
    from gradwire_lab.compress.oktopk import oktopk as oktopk
    from gradwire_lab.compress.redsync import redsync as redsync
    from gradwire_lab.compress.sharded_dgc import sharded_dgc as sharded_dgc
    from gradwire_lab.compress.sidco import sidco as sidco
    from gradwire_lab.compress.spardl import spardl as spardl
    from gradwire_lab.compress.tbq import tbq as tbq
    from gradwire_lab.compress.threelc import threelc as threelc

    from .cast16 import cast16 as cast16
    from .deft import deft as deft
    from .dgc import dgc as dgc
    from .fp8 import fp8 as fp8
    from .int8 import int8 as int8
    from .lossless import lossless as lossless
    from .none import none as none
    from .nonzero import nonzero as nonzero
    from .onebit import onebit as onebit
    from .powersgd import powersgd as powersgd
    from .qsgd import qsgd as qsgd
    from .randomk import randomk as randomk
    from .selective import selective as selective
    from .terngrad import terngrad as terngrad
    from .topk import topk as topk
    from .uniform import uniform as uniform

make_registry(__name__)
