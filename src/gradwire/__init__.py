"""gradwire: data-parallel PyTorch training that stays fast on slow networks, honestly measured.

import gradwire as gw
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import collective as collective
    from . import compress as compress
    from .contract import Compressor as Compressor
    from .contract import Traits as Traits
    from .exchange import Exchange as Exchange
    from .exchange import pair as pair
    from .exchange import residuals as residuals
    from .exchange import run_local as run_local
    from .exchange import with_error_feedback as with_error_feedback
    from .payload import Payload as Payload
    from .runtime.attach import attach as attach
    from .runtime.checkpoint import redistribute as redistribute
    from .spec import TensorSpec as TensorSpec
    from .trace.span import Span as Span
    from .trace.span import Trace as Trace

# Resolved at first use, so that the command line does not wait for torch to print its help.
_HOMES = {
    "contract": ("Compressor", "Traits"),
    "exchange": ("Exchange", "pair", "residuals", "run_local", "with_error_feedback"),
    "payload": ("Payload",),
    "runtime.attach": ("attach",),
    "runtime.checkpoint": ("redistribute",),
    "spec": ("TensorSpec",),
    "trace.span": ("Span", "Trace"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["__version__", "collective", "compress", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name in ("collective", "compress"):
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"gradwire has no {name!r}; there are: {', '.join(__all__)}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return found
