"""Steps done, as wrappers that change in the course of training count them.

The count is a tensor for each tensor of the message, so that it is saved by parameter and training
resumes in the same stage, however messages are fused. All ranks have the same count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract.spec import TensorSpec

Steps_T = tuple[Tensor, ...]
"""The steps done (int64), once for each tensor of the message."""


def no_steps(spec: TensorSpec) -> Steps_T:
    """The count before the first step."""
    return tuple(torch.zeros((), dtype=torch.int64) for _ in spec.tensor_shapes)


def steps_done(step_T: Steps_T) -> int | None:
    """The message's count; None in predictions, whose states hold no values."""
    # A parameter that no rank used in some step is one step behind; the message is not.
    done = torch.stack(step_T).max()
    return None if done.is_meta else int(done)


def count_step(step_T: Steps_T) -> None:
    """Counts one more step of the message, in place."""
    done = steps_done(step_T)
    if done is not None:
        for step in step_T:
            step.fill_(done + 1)
