"""Places of the tensors that lie in a message."""

from math import prod

from gradwire.contract.spec import TensorSpec


def tensor_places(spec: TensorSpec) -> tuple[int, ...]:
    """The places of the tensors with elements among the shapes of a message."""
    return tuple(place for place, shape in enumerate(spec.shapes) if prod(shape)) or (
        0,
    )
