"""Refuse to save infinite or NaN values: such a checkpoint would be the newest intact one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..format.fragment import MASTER, Fragment

SHOWN = 3


def non_finite(fragments: Iterable[Fragment], compute: torch.dtype = torch.float32) -> list[str]:
    """Values of this rank's fragments that no run can continue from. One sentence per tensor, the first few.

    One pass over the memory, and one synchronization with the device.

    Args:
        compute: type of the forward pass. A master beyond its range is infinite there.
    """
    looked = [each for each in fragments if each.data.is_floating_point() and each.data.numel()]
    if not looked:
        return []
    # An infinity or a NaN anywhere shows in the extremes, and no sum can overflow.
    extremes = [torch.stack(torch.aminmax(each.data.detach())).abs().amax() for each in looked]
    largest = torch.stack([value.double() for value in extremes]).tolist()
    range_of = torch.finfo(compute).max
    found = []
    for fragment, value in zip(looked, largest, strict=True):
        name = f"{fragment.tensor.name} ({fragment.state})"
        if not math.isfinite(value):
            found.append(f"{name} has values that are infinite or no numbers")
        elif fragment.state == MASTER and not fragment.tensor.keep_fp32 and value > range_of:
            found.append(f"{name} has {value:.3g}, beyond the largest number of {str(compute).removeprefix('torch.')}")
    rest = len(found) - SHOWN
    return found[:SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
