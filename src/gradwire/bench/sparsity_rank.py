"""One rank of ``gradwire profile --sparsity`` under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import nn

from ..data.sparsity import SparsityProfile
from ..measure.layers import TrainingStep
from ..measure.sparsity import measure_sparsity
from ..runtime.engine import Engine
from ..runtime.membership import join
from .launched import launched_group


def measure_launched(
    model: nn.Module,
    step: TrainingStep,
    *,
    num_gradients: int | None,
    compressor: str | None,
    settings: Mapping[str, Any],
    advance: Callable[..., None],
) -> SparsityProfile:
    """Measures in the group that torchrun's variables describe."""
    with launched_group():
        return measure_group(
            model,
            step,
            num_gradients=num_gradients,
            compressor=compressor,
            settings=settings,
            advance=advance,
        )


def measure_group(model: nn.Module, step: TrainingStep, **asked: Any) -> SparsityProfile:
    """Measures sparsity among the ranks of torch's default group, which all call this alike."""
    engine = Engine(
        join(None), num_channels=1, timeout=timedelta(minutes=2), on_span=lambda span: None
    )
    try:
        return measure_sparsity(model, step, engine=engine, **asked)
    finally:
        engine.close()
