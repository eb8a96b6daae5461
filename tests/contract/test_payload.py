"""Payloads: one byte buffer, typed views, and the same size with or without content."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.payload import Field, Format, Payload
from gradwire.errors import InvalidSetting
from tests.each import each
from tests.strategies import bounded

DTYPES = (
    torch.uint8,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
fields = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 20)), max_size=5)


def make(parts: list[tuple[torch.dtype, int]]) -> Format:
    return Format(tuple(Field(f"f{i}", dtype, n) for i, (dtype, n) in enumerate(parts)))


@bounded(100)
@given(parts=fields)
def test_fields_are_aligned_disjoint_and_fill_the_size(parts) -> None:
    form = make(parts)
    end = 0
    for field, offset in zip(form, form.offsets, strict=True):
        assert offset % field.dtype.itemsize == 0
        assert end <= offset < end + field.dtype.itemsize
        assert form.place(field.name) == (
            offset,
            offset + field.size_bytes,
            field.dtype,
        )
        end = offset + field.size_bytes
    assert form.size_bytes == end
    assert form.slot_bytes % 8 == 0
    assert 0 <= form.slot_bytes - form.size_bytes < 8


@bounded(50)
@given(parts=fields)
def test_views_write_through_to_the_buffer(parts) -> None:
    payload = Payload.empty(make(parts))
    for i, field in enumerate(payload.format):
        payload[field.name].fill_(i + 1)
    for i, field in enumerate(payload.format):
        view = payload[field.name]
        assert view.dtype == field.dtype
        assert view.tolist() == [i + 1] * field.numel
    again = Payload(payload.format, payload.buffer.clone())
    assert all(torch.equal(again[f.name], payload[f.name]) for f in payload.format)


@bounded(50)
@given(parts=fields)
def test_size_only_has_the_size_and_no_content(parts) -> None:
    form = make(parts)
    empty = Payload(form)
    assert empty.buffer is None
    assert empty.size_bytes == Payload.empty(form).buffer.numel() == form.size_bytes
    assert "size only" in repr(empty)
    for field in form:
        with pytest.raises(
            InvalidSetting, match="'size only'; encode a gradient first"
        ):
            empty[field.name]


@each(
    "buffer",
    [
        torch.zeros(7, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.float32),
        torch.zeros(16, dtype=torch.uint8)[::2],
    ],
    ids=["too short", "not bytes", "not contiguous"],
)
def test_wrong_buffers_are_refused(buffer: torch.Tensor) -> None:
    form = make([(torch.float32, 2)])
    with pytest.raises(
        InvalidSetting, match=r"must be 8 contiguous uint8, got .*Payload.empty"
    ):
        Payload(form, buffer)


def test_a_name_that_no_field_has_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Payload.empty(make([(torch.int32, 3)]))["indices"]
