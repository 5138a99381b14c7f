"""Whether two strided views share a byte: exactly, from addresses and strides alone."""

from __future__ import annotations

from torch import Tensor

BUDGET = 10_000
"""Steps after which an undecided pair counts as overlapping (views that no allocator makes)."""


def storage_start(tensor: Tensor) -> int:
    """Address of the first byte of the tensor's storage."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether an element of `a` and an element of `b` share a byte.

    Tensors on different storages pass by the storage address alone. For the others the question is
    whether an element address of one equals one of the other, which is a bounded linear equation:
    `sum(stride * index) = difference of the starts`, with a window for the bytes of an element.
    """
    if 0 in a.shape or 0 in b.shape or storage_start(a) != storage_start(b):
        return False
    if a.device.type == "meta":  # no addresses: every one is 0
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    # Reversing b's indices makes every coefficient positive; equal coefficients are one variable.
    ranges = {1: a.element_size() + b.element_size() - 2}
    target = b.data_ptr() - a.data_ptr() + b.element_size() - 1
    for tensor, reversed_ in ((a, False), (b, True)):
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            step = stride * tensor.element_size()
            if size > 1 and step:
                ranges[step] = ranges.get(step, 0) + size - 1
                target += step * (size - 1) if reversed_ else 0
    return _reachable(sorted(ranges.items(), reverse=True), target)


def _reachable(terms: list[tuple[int, int]], target: int) -> bool:
    """Whether `sum(step * x) = target` with `0 <= x <= most` for each `(step, most)`.

    Depth first, the largest step first: what the smaller steps can add bounds each x, so that for
    nested views at most two values are tried at each level.
    """
    rest = [0] * (len(terms) + 1)
    for i in range(len(terms) - 1, -1, -1):
        step, most = terms[i]
        rest[i] = rest[i + 1] + step * most
    stack, steps = [(0, target)], 0
    while stack:
        i, left = stack.pop()
        steps += 1
        if left == 0 or steps > BUDGET:
            return True
        if i == len(terms) or not 0 < left <= rest[i]:
            continue
        step, most = terms[i]
        low = max(0, -(-(left - rest[i + 1]) // step))
        high = min(most, left // step)
        if high - low > BUDGET:
            return True
        stack += [(i + 1, left - step * x) for x in range(low, high + 1)]
    return False
