"""gradwire: data-parallel PyTorch training that stays fast on slow networks, and says when it
cannot.

import gradwire as gw
"""

from __future__ import annotations

from . import collective as collective
from . import compress as compress
from ._version import __version__ as __version__
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
