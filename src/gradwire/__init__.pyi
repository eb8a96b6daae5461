"""The names that ``__init__.py`` looks up at first use."""

from . import collective as collective
from . import compress as compress
from . import errors as errors
from ._version import __version__ as __version__
from .collective._types import Collective as Collective
from .contract import Compressor as Compressor
from .contract import Layout as Layout
from .contract import Traits as Traits
from .errors import InvalidSetting as InvalidSetting
from .errors import RankFailed as RankFailed
from .errors import RanksDiffer as RanksDiffer
from .exchange import Exchange as Exchange
from .exchange import exchange_for as exchange_for
from .exchange import pair as pair
from .exchange import residuals as residuals
from .exchange import run_local as run_local
from .exchange import with_error_feedback as with_error_feedback
from .payload import Field as Field
from .payload import Format as Format
from .payload import Payload as Payload
from .runtime.attach import attach as attach
from .runtime.checkpoint import redistribute as redistribute
from .runtime.handle import Handle as Handle
from .spec import TensorSpec as TensorSpec
from .trace.span import Span as Span
from .trace.span import Trace as Trace
