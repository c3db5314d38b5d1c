"""How DeepSpeed 0.19.8 cuts gradients into messages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def buckets_after(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements of messages where a bucket is sent as soon as it has more than `limit`, and larger tensors alone."""
    sizes = list(sizes)
    messages, filled = [size for size in sizes if size > limit], 0
    for size in (each for each in sizes if each <= limit):
        filled += size
        if filled > limit:
            messages.append(filled)
            filled = 0
    return messages + [filled] * bool(filled)


def buckets_before(order: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Messages where a bucket is sent when the next parameter would make it larger than `limit` elements."""
    messages: list[list[nn.Parameter]] = [[]]
    filled = 0
    for each in order:
        if filled and filled + each.numel() > limit:
            messages.append([])
            filled = 0
        messages[-1].append(each)
        filled += each.numel()
    return messages
