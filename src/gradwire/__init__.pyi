"""The names that ``__init__.py`` looks up at first use."""

from typing import Any

from . import collective as collective
from . import compress as compress
from . import errors as errors
from . import pilot as pilot
from .contract import Compressor as Compressor
from .contract import Exchange as Exchange
from .contract import Layout as Layout
from .contract import Traits as Traits
from .contract.collective import Collective as Collective
from .contract.payload import Field as Field
from .contract.payload import Format as Format
from .contract.payload import Payload as Payload
from .contract.spec import TensorSpec as TensorSpec
from .contract.trace.span import Span as Span
from .contract.trace.span import Trace as Trace
from .errors import InvalidSetting as InvalidSetting
from .errors import LoopMistake as LoopMistake
from .errors import RankFailed as RankFailed
from .errors import RanksDiffer as RanksDiffer
from .errors import RanksLost as RanksLost
from .exchange.by_name import exchange_for as exchange_for
from .exchange.by_name import run_local as run_local
from .exchange.error_feedback import residuals as residuals
from .exchange.error_feedback import with_error_feedback as with_error_feedback
from .exchange.natural import with_natural_sparsity as with_natural_sparsity
from .exchange.pair import pair as pair
from .measure.layers import profile as profile
from .planning import catalogue as catalogue
from .planning import planner as planner
from .planning.data.cluster import Cluster as Cluster
from .planning.data.plan import Plan as Plan
from .planning.data.profile import Profile as Profile
from .planning.data.sparsity import SparsityProfile as SparsityProfile
from .planning.make_plan import plan as plan
from .planning.simulation.timeline import simulate as simulate
from .runtime import fsdp as fsdp
from .runtime.attach import attach as attach
from .runtime.handle import Handle as Handle
from .runtime.local_steps import recipes as recipes
from .runtime.local_steps.local_steps import local_steps as local_steps
from .runtime.serve import serve as serve
from .runtime.settings import FailurePolicy as FailurePolicy
from .runtime.settings import Options as Options
from .runtime.state.redistribution import redistribute as redistribute
from .runtime.step.figures import mean_residual_norm as mean_residual_norm
from .version import __version__ as __version__

# gradwire-lab has these, and need not be installed.
def adapt(algorithm: Compressor | Exchange, **settings: Any) -> Exchange: ...
def deep_gradient_compression(**settings: Any) -> Exchange: ...
def measure_sparsity(*args: Any, **settings: Any) -> SparsityProfile: ...
def with_clipping(algorithm: Compressor | Exchange, max_norm: float) -> Exchange: ...
def with_decoupled_momentum(
    algorithm: Compressor | Exchange, decay: float = 0.999
) -> Exchange: ...
def with_density_warmup(
    algorithm: Compressor | Exchange, **settings: Any
) -> Exchange: ...
def with_measured_scheme(
    algorithm: Compressor | Exchange, **settings: Any
) -> Exchange: ...
def with_momentum_correction(
    algorithm: Compressor | Exchange,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
) -> Exchange: ...
def with_warmup(algorithm: Compressor | Exchange, steps: int) -> Exchange: ...
