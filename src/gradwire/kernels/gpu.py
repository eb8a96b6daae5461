"""Whether kernels for a GPU can be made here: they are written in triton, which is optional."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

_log = logging.getLogger("gradwire")


@cache
def has_triton() -> bool:
    """Whether triton is installed; says once that it is not, so ask only where a GPU waits."""
    found = find_spec("triton") is not None
    if not found:
        _log.warning(
            "GPU kernels run as slow torch code: triton is not installed; "
            'run: pip install "gradwire[triton]" to have them fast'
        )
    return found
