"""Payload: what crosses the wire, one contiguous byte buffer with typed views into it.

A ``Format`` is the layout alone (names, dtypes, counts, offsets). Both ends derive it
from the tensor's spec, so nothing describes itself on the wire; a payload without a
buffer has a size but no content and is what the simulator sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..errors import invalid


def slot_bytes(size_bytes: int) -> int:
    """The size rounded up to 8 bytes, so that payloads in a row stay aligned."""
    return -(-size_bytes // 8) * 8


@dataclass(frozen=True, slots=True)
class Field:
    """One typed array inside a payload.

    Args:
        name: Its name in the payload.
        dtype: The dtype of its elements.
        numel: The number of its elements.

    >>> Field("values", torch.float16, 3).size_bytes
    6
    """

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Format:
    """The fields of a payload in order, each aligned to its own item size.

    Args:
        fields: The fields, a tuple of ``Field``.

    >>> scales = Field("scales", torch.float32, 2)
    >>> Format((scales, Field("bits", torch.uint8, 3))).size_bytes
    11
    """

    fields: tuple[Field, ...]
    offsets: tuple[int, ...] = field(init=False)
    size_bytes: int = field(init=False)
    slot_bytes: int = field(init=False, compare=False, repr=False)
    """The room that a payload of this layout takes among others."""

    def __post_init__(self) -> None:
        offsets = []
        end = 0
        for part in self.fields:
            start = -(-end // part.dtype.itemsize) * part.dtype.itemsize
            offsets.append(start)
            end = start + part.size_bytes
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "size_bytes", end)
        object.__setattr__(self, "slot_bytes", slot_bytes(end))

    @property
    def num_entries(self) -> int | None:
        """The number of entries of a sparse payload; None where it does not follow."""
        return next((part.numel for part in self if part.name == "indices"), None)

    @cached_property
    def places(self) -> dict[str, tuple[int, int, torch.dtype]]:
        """The ``place`` of each field, by name."""
        return {
            part.name: (start, start + part.size_bytes, part.dtype)
            for part, start in zip(self.fields, self.offsets, strict=True)
        }

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(first byte, byte behind the last) of what lies between fields."""
        ends = [
            start + part.size_bytes
            for part, start in zip(self, self.offsets, strict=True)
        ]
        pairs = zip(ends, self.offsets[1:], strict=False)
        return tuple((end, start) for end, start in pairs if end < start)

    def place(self, name: str) -> tuple[int, int, torch.dtype]:
        """The place of one field.

        Args:
            name: The field's name.

        Returns:
            Its first byte, the byte behind its last, and its dtype.

        >>> fields = Field("bits", torch.uint8, 3), Field("scales", torch.float32, 2)
        >>> Format(fields).place("scales")
        (4, 12, torch.float32)
        """
        return self.places[name]

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)


class Payload:
    """Encoded gradient. ``payload["indices"]`` is a typed view, never a copy.

    Args:
        format: The layout.
        buffer: The bytes, uint8 and contiguous. None (the default): a size without
            content.

    Raises:
        InvalidSetting: The buffer has another dtype or size.

    >>> payload = Payload.empty(Format((Field("values", torch.float32, 2),)))
    >>> payload["values"], payload.size_bytes
    (tensor([0., 0.]), 8)
    """

    __slots__ = ("buffer", "format")

    def __init__(self, format: Format, buffer: Tensor | None = None) -> None:
        if buffer is not None and (
            buffer.dtype != torch.uint8
            or not buffer.is_contiguous()
            or buffer.numel() != format.size_bytes
        ):
            raise invalid(
                "payload buffer",
                f"{tuple(buffer.shape)} {buffer.dtype}",
                f"{format.size_bytes} contiguous uint8",
                "take it from Payload.empty(format)",
            )
        self.format = format
        self.buffer = buffer

    @classmethod
    def empty(
        cls,
        format: Format,
        buffer: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Payload:
        """A payload to be filled.

        Args:
            format: The layout.
            buffer: The bytes to fill. Default: a new buffer of zeros.
            device: The device of a new buffer. Default: torch's.

        Returns:
            The payload. Bytes between fields are zeros: equal gradients have equal
            payloads.
        """
        if buffer is None:
            return cls(
                format, torch.zeros(format.size_bytes, dtype=torch.uint8, device=device)
            )
        made = cls(format, buffer)
        for start, stop in format.gaps:
            buffer[start:stop] = 0
        return made

    @property
    def size_bytes(self) -> int:
        return self.format.size_bytes

    @property
    def content(self) -> Tensor:
        """The bytes; raises ``InvalidSetting`` where there is only a size."""
        if self.buffer is None:
            raise invalid(
                "payload", "size only", "one with content", "encode a gradient first"
            )
        return self.buffer

    def __getitem__(self, name: str) -> Tensor:
        start, stop, dtype = self.format.place(name)
        return self.content[start:stop].view(dtype)

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name}: {f.numel} {f.dtype}" for f in self.format)
        content = "" if self.buffer is not None else ", size only"
        return f"Payload({fields}; {self.size_bytes} bytes{content})"
