"""Collectives, one a file: generators of verbs that combine ranks' payloads.

No collective imports ``torch.distributed`` or a compressor: drivers carry out the
verbs, and codecs come in as arguments. The steps that several share lie in ``steps``.
"""

from typing import TYPE_CHECKING, Any

from ..contract.registry import make_registry

if TYPE_CHECKING:
    from .allgather_sparse import allgather_sparse as allgather_sparse
    from .allreduce import allreduce as allreduce
    from .casync_ps import casync_ps as casync_ps
    from .ring import ring as ring
    from .zen import zen as zen

    def __getattr__(name: str) -> Any: ...  # the algorithms of other packages


make_registry(__name__)
