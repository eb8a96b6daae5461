"""Profile: what was measured of a model, as data: all that planners and the simulator know of it.

Source: US-Byte (table 1): per layer t_f, t_b and M. Here a layer may own several tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import InvalidSetting

SCHEMA = 1

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DType = Literal["float32", "float16", "bfloat16", "float64"]
_ITEM_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class ProfiledTensor(_Frozen):
    """One parameter whose gradient is exchanged."""

    name: Annotated[str, Field(min_length=1)]
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: DType = "float32"

    @property
    def numel(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    @property
    def size_bytes(self) -> int:
        return self.numel * _ITEM_BYTES[self.dtype]


class Layer(_Frozen):
    """One layer: its tensors, and the seconds of its forward and backward computation.

    All its gradients are ready when its backward ends; its forward may start when all its
    parameters are up to date.
    """

    name: Annotated[str, Field(min_length=1)]
    tensors: tuple[ProfiledTensor, ...]
    forward_s: Seconds
    backward_s: Seconds

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


class Profile(_Frozen):
    """A model's layers in forward order, and where the figures come from.

    Raises ``InvalidSetting`` when read from a file that is empty, of another schema, or holds a
    negative, NaN or doubled entry; the message names the entry.
    """

    schema_version: Literal[1] = 1
    model: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    """How the times were got: device and date of a measurement, or the stated throughput model."""
    batch_size: Annotated[int, Field(ge=1)]
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Profile:
        for what, names in (
            ("layer", [layer.name for layer in self.layers]),
            ("tensor", [tensor.name for layer in self.layers for tensor in layer.tensors]),
        ):
            seen: set[str] = set()
            for name in names:
                if name in seen:
                    raise ValueError(f"{what} {name!r} is listed twice")
                seen.add(name)
        return self

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

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def parse(cls, text: str, origin: str = "profile") -> Profile:
        """Reads JSON text; ``origin`` is what errors call it."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise InvalidSetting(
                f"{origin} cannot be read: {where}: {first['msg']} (schema {SCHEMA} is accepted); "
                "write it again with gradwire profile"
            ) from None

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        return cls.parse(Path(path).read_text(), str(path))
