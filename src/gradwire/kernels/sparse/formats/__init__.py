"""Layouts of sparse vectors on the wire: ``coo.py`` defines ``formats.coo``.

Each states its size as a formula of counts that all ranks can know
(``SparseFormat.size_bytes``). ``choose`` and collectives find them by name. A format
knows the entries of one part, and no rank.
"""

from typing import TYPE_CHECKING

from ....contract.registry import make_registry

if TYPE_CHECKING:
    from .coo import coo as coo
    from .dense import dense as dense
    from .elias_fano import elias_fano as elias_fano
    from .hash_bitmap import hash_bitmap as hash_bitmap

make_registry(__name__)
