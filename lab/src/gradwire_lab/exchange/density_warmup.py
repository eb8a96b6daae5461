"""Warm-up of density: training begins with more of each gradient than it goes on with.

In its first steps a network changes fast and its gradients are large. Values that a
sparsifier holds back then would arrive when they no longer fit.

Source: Lin et al., ICLR 2018, "Deep Gradient Compression", section 3.3 (warm-up
    training): over the first four epochs 25 %, 6.25 %, 1.5625 % and 0.4 % of a gradient
    are sent, then 0.1 %.
Differences: counted in steps, as an exchange knows no epochs. Only the density is
    warmed up; the learning rate is the scheduler's.
Wire: the inner exchange's at the stage's density; buffers change their size between
stages only.
State: step_T, the steps done (int64), once for each tensor of the message, and the
    inner state, which goes on from stage to stage.
Contributed: the same as the inner exchange's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from gradwire.contract import Compressor, Exchange, Member, Residual, State
from gradwire.contract.bounds import check_share, check_whole
from gradwire.contract.spec import TensorSpec
from gradwire.contract.state import leaves
from gradwire.contract.verbs import Steps
from gradwire.errors import invalid, names_checked
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import Wrapper, chooser_of
from gradwire.exchange.without_data import algorithms_in

from .warmup import WarmupState, no_steps, steps_done

DENSITIES = (0.25, 0.0625, 0.015625, 0.004, 0.001)
"""The densities of the paper's stages; the last one is for good."""


@dataclass(frozen=True)
class DensityWarmup(Wrapper):
    """The inner exchange with one density after the other.

    Made by ``with_density_warmup``.
    """

    changes: ClassVar[bool] = True

    steps_per_stage: int = 1
    densities: tuple[float, ...] = DENSITIES
    stages: tuple[Exchange, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole("steps_per_stage", self.steps_per_stage, "write 500")
        if not self.densities:
            raise invalid("densities", self.densities, "at least one", "leave it out")
        for number, density in enumerate(self.densities):
            check_share(f"densities[{number}]", density)
        if chooser_of(self.inner) is not None:
            raise invalid(
                "exchange to warm up",
                self.inner,
                "an exchange with one density; gw.adapt chooses one for each layer",
                "use one of the two",
            )
        stages = tuple(_at_density(self.inner, density) for density in self.densities)
        object.__setattr__(self, "stages", stages)

    def init(self, spec: TensorSpec, world: int) -> WarmupState:
        first, *others = self.stages
        state = first.init(spec, world)
        # All stages now: each compiles its kernels, and shows that it can take on the
        # state. One after the other, as a state may be several times the gradient.
        if any(_form(stage.init(spec, world)) != _form(state) for stage in others):
            raise invalid(
                "exchange to warm up",
                self.inner,
                "an exchange whose state has the same shape at all densities",
                "leave the warm-up out",
            )
        return WarmupState(no_steps(spec), state)

    def synchronise(
        self,
        me: Member,
        state: WarmupState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        stage = self.stage(state)
        inner = yield from me.through(stage, state.inner, grad_N, out_N, residual_N)
        return state.after(inner)

    def stage(self, state: WarmupState) -> Exchange:
        """The exchange of the next step; in predictions, that of the last stage."""
        done = steps_done(state.step_T)
        if done is None:
            return self.stages[-1]
        place = done // self.steps_per_stage
        return self.stages[min(place, len(self.stages) - 1)]


@names_checked
def with_density_warmup(
    algorithm: Compressor | Exchange,
    *,
    steps_per_stage: int,
    densities: Sequence[float] | None = None,
) -> Exchange:
    """Starts with a high density, which falls in stages.

    Args:
        algorithm: A compressor or an exchange with a setting ``density``.
        steps_per_stage: Steps of each stage.
        densities: The density of each stage; the last one stays. The default is the
            paper's densities above the algorithm's own, and then that.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: The algorithm has no density, or a value is out of range.

    >>> from gradwire.compress.topk import topk
    >>> with_density_warmup(topk(density=0.01), steps_per_stage=500).densities
    (0.25, 0.0625, 0.015625, 0.01)
    """
    exchange = exchange_for(algorithm)
    present = sorted(set(_densities(exchange)))
    if not present:
        raise invalid(
            "exchange to warm up",
            exchange,
            "an algorithm with a setting density",
            "leave the warm-up out",
        )
    if densities is not None and not isinstance(densities, Sequence):
        raise invalid("densities", densities, "a sequence of densities", "leave it out")
    chosen = warming_to(present[-1]) if densities is None else tuple(densities)
    return DensityWarmup(exchange, steps_per_stage, chosen)


def warming_to(density: float) -> tuple[float, ...]:
    """The paper's densities above this one, and then this one."""
    return (*(stage for stage in DENSITIES if stage > density), density)


def _densities(part: Any) -> Iterator[float]:
    """The densities of a compressor or an exchange, and of its parts."""
    for name, value in algorithms_in(part).items():
        if name == "density":
            yield value
        elif isinstance(value, Compressor | Exchange):
            yield from _densities(value)


def _at_density(part: Any, density: float) -> Any:
    """The same exchange with every density in it replaced by this one."""
    changed = {
        name: density if name == "density" else _at_density(value, density)
        for name, value in algorithms_in(part).items()
        if name == "density" or isinstance(value, Compressor | Exchange)
    }
    return replace(part, **changed) if changed else part


def _form(state: State) -> object:
    """The shapes and dtypes of a state's tensors, by their paths."""
    return [(path, tensor.shape, tensor.dtype) for path, tensor in leaves(state)]
