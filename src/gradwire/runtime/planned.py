"""A plan carried out: its chunks become messages, its exchanges are made, its order is kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..cost.profile import Layer, Profile, ProfiledTensor
from ..errors import InvalidSetting
from ..planner._check import check
from ..planner._exchanges import exchanges_of, refuse_cuts
from ..planner._types import Plan
from .messages import Message, Part

Named = tuple[str, Tensor]
"""A parameter and its name."""


def messages_of(plan: Plan, params: Sequence[Named], rank: int, world: int) -> list[Message]:
    """The messages of ``plan`` in issue order."""
    of = dict(params)
    exchanges = exchanges_of(plan)
    return [
        Message(
            index,
            [Part(c.tensor, of[c.tensor], c.start, c.stop) for c in message.chunks],
            exchanges[message.exchange],
            rank,
            world,
            after=message.after,
        )
        for index, message in enumerate(plan.messages)
    ]


def algorithm(plan: Plan) -> str:
    """What of a plan gives saved state its meaning: its exchanges, not its order or its cuts."""
    used = {message.exchange for message in plan.messages}
    texts = {repr(made) for name, made in exchanges_of(plan).items() if name in used}
    return f"plan of {', '.join(sorted(texts))}"


def check_for(plan: Plan, params: Sequence[Named], sparse: set[int]) -> None:
    """Raises ``InvalidSetting`` unless ``plan`` can be carried out for these parameters.

    ``sparse`` are ids of parameters whose gradients are row-sparse; they cannot be cut.
    """
    try:
        tensors = tuple(
            ProfiledTensor.model_validate(
                {
                    "name": name,
                    "shape": tuple(param.shape),
                    "dtype": str(param.dtype).removeprefix("torch."),
                }
            )
            for name, param in params
        )
    except ValueError as error:
        raise InvalidSetting(f"no plan can carry this model: {error}") from None
    for name, param in params:
        if id(param) in sparse:
            raise InvalidSetting(
                f"{name} has row-sparse gradients, which no plan carries; build its embedding with "
                "sparse=False, or attach an exchange instead of a plan"
            )
    layer = Layer(name="all", tensors=tensors, forward_s=0.0, backward_s=0.0)
    check(plan, Profile(model=plan.model, source="attached", batch_size=1, layers=(layer,)))
    refuse_cuts(plan, {name: param.numel() for name, param in params})
    _refuse_cut_strides(plan, dict(params))


def _refuse_cut_strides(plan: Plan, params: dict[str, Tensor]) -> None:
    for number, message in enumerate(plan.messages):
        for chunk in message.chunks:
            param = params[chunk.tensor]
            if chunk.numel < param.numel() and not param.is_contiguous():
                raise InvalidSetting(
                    f"message {number} cuts {chunk.tensor}, whose elements do not lie in order in "
                    f"memory (strides {param.stride()}); make it contiguous, or plan it whole"
                )
