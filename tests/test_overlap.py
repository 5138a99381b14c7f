"""Overlap is decided exactly: compared with the sets of bytes that two views touch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_index import overlap
from mla_index.overlap import overlaps

BUFFER = torch.zeros(256, dtype=torch.int32)


def touched(view):
    index = torch.zeros(view.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        shape = [1] * view.dim()
        shape[dim] = size
        index = index + (torch.arange(size) * stride).view(shape)
    first = {int(i) * view.element_size() + view.data_ptr() for i in index.flatten()}
    return {start + byte for start in first for byte in range(view.element_size())}


@st.composite
def views(draw):
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    base = BUFFER.view(dtype)
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
    strides = [draw(st.integers(0, 9)) for _ in sizes]
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    offset = draw(st.integers(0, max(0, base.numel() - span - 1)))
    return base.as_strided(sizes, strides, min(offset, 24))


@given(views(), views())
@settings(max_examples=600, derandomize=True, deadline=None)
def test_against_the_sets_of_bytes(a, b):
    assert overlaps(a, b) == bool(touched(a) & touched(b))
    assert overlaps(b, a) == overlaps(a, b)


def test_columns_and_rows_of_one_buffer_do_not_overlap():
    buffer = torch.zeros((65_536, 4_097), dtype=torch.int32)
    left, right, last = buffer[:, :2048], buffer[:, 2048:4096], buffer[:, 4096]
    assert not overlaps(left, right)
    assert not overlaps(right, last)
    assert overlaps(left, buffer[:, 2047:4095])
    assert not overlaps(buffer[0::2], buffer[1::2])
    assert overlaps(buffer[0::2], buffer[4:5])
    assert not overlaps(left, left.clone())


def test_two_pitches_of_one_storage():
    flat = torch.zeros(1_000_000, dtype=torch.int32)
    wide = flat.as_strided((1000, 3), (1000, 1), 0)
    assert not overlaps(wide, flat.as_strided((999,), (1000,), 3))
    assert overlaps(wide, flat.as_strided((300,), (1003,), 0))


def test_what_cannot_be_decided_quickly_counts_as_overlapping(monkeypatch):
    """Two views that share nothing, but whose strides make the search long."""
    flat = torch.zeros(2_000, dtype=torch.int32)
    a = flat.as_strided((12, 12), (60, 66), 0)
    b = flat.as_strided((12, 12), (72, 78), 1)  # every index of a is a multiple of 6, of b one more
    assert not touched(a) & touched(b)
    assert not overlaps(a, b)
    monkeypatch.setattr(overlap, "BUDGET", 3)
    assert overlaps(a, b)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_nothing_overlaps_an_empty_view(shape):
    assert not overlaps(BUFFER[:0].view(shape), BUFFER)
