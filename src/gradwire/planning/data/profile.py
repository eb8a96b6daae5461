"""Profile: what was measured of a model, as data: all that planners and the simulator
know of it.

Source: US-Byte (table 1): per layer t_f, t_b and M. Here a layer may own several
tensors.
"""

from math import prod
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .sparsity import SparsityProfile
from .stored import MOST_ELEMENTS, Frozen, NonNegative, Stored, Whole, check_once

GradientDType = Literal["float32", "float16", "bfloat16", "float64"]
_ITEM_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class ProfiledTensor(Frozen):
    """One parameter whose gradient is exchanged."""

    name: Annotated[str, Field(min_length=1)]
    shape: tuple[Whole, ...]
    dtype: GradientDType = "float32"

    @model_validator(mode="after")
    def _can_be_held(self) -> Self:
        if self.numel > MOST_ELEMENTS:
            raise ValueError(f"a tensor of more than {MOST_ELEMENTS} elements")
        return self

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * _ITEM_BYTES[self.dtype]


class Layer(Frozen):
    """One layer: its tensors, and the seconds of its forward and backward computation.

    All its gradients are ready when its backward ends; its forward may start when all
    its parameters are up to date.
    """

    name: Annotated[str, Field(min_length=1)]
    tensors: tuple[ProfiledTensor, ...]
    forward_s: NonNegative
    backward_s: NonNegative

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


class Profile(Stored):
    """A model's layers in forward order, and where the figures come from.

    Args:
        model: The model's name.
        source: How the times were got: device and date of a measurement, or the stated
            throughput model.
        batch_size: The samples of a step on each rank.
        layers: The layers, in forward order.
        sparsity: The sparsity of the gradients. None (the default): it was not
            measured.

    Raises:
        InvalidSetting: ``load`` and ``parse`` raise it for a file that is empty or has
            another schema, or a negative, NaN or doubled entry. The message names the
            entry.

    >>> weight = ProfiledTensor(name="fc.weight", shape=(20, 50))
    >>> layer = Layer(name="fc", tensors=(weight,), forward_s=0.001, backward_s=0.002)
    >>> profile = Profile(
    ...     model="small", source="stated", batch_size=8, layers=(layer,)
    ... )
    >>> profile.size_bytes
    4000
    """

    WRITTEN_BY: ClassVar[str] = "gradwire profile"

    model: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    batch_size: Annotated[Whole, Field(ge=1)]
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    sparsity: SparsityProfile | None = None

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        tensors = (tensor for layer in self.layers for tensor in layer.tensors)
        check_once("layer", (layer.name for layer in self.layers))
        check_once("tensor", (tensor.name for tensor in tensors))
        return self

    @model_validator(mode="after")
    def _sparsity_is_of_these_tensors(self) -> Self:
        tensors = self.tensors
        for one in () if self.sparsity is None else self.sparsity.tensors:
            tensor = tensors.get(one.name)
            if tensor is None:
                raise ValueError(
                    f"sparsity of {one.name!r}, which is no tensor of the model"
                )
            for units in (one.units, one.blocks):
                if units.num_units != -(-tensor.numel // units.width):
                    raise ValueError(
                        f"sparsity of {one.name!r} is of {units.num_units} units of "
                        f"{units.width} elements, and it has {tensor.numel} elements"
                    )
        return self

    def with_sparsity(self, sparsity: SparsityProfile) -> Self:
        """The same with another sparsity.

        Args:
            sparsity: That of this model's tensors.

        Raises:
            ValueError: It is of other tensors.
        """
        return type(self).model_validate({**dict(self), "sparsity": sparsity})

    def slower(self, factor: float) -> Self:
        """The same model on a device that computes it more slowly.

        Args:
            factor: The factor on the seconds of each layer.
        """
        layers = tuple(
            layer.model_copy(
                update={
                    "forward_s": factor * layer.forward_s,
                    "backward_s": factor * layer.backward_s,
                }
            )
            for layer in self.layers
        )
        return self.model_copy(update={"layers": layers})

    @property
    def tensors(self) -> dict[str, ProfiledTensor]:
        """All tensors by name, in forward order."""
        every = (tensor for layer in self.layers for tensor in layer.tensors)
        return {tensor.name: tensor for tensor in every}

    @property
    def layer_of(self) -> dict[str, int]:
        """The place in forward order of each tensor's layer, by the tensor's name."""
        return {
            tensor.name: place
            for place, layer in enumerate(self.layers)
            for tensor in layer.tensors
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(layer.size_bytes for layer in self.layers)

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)
