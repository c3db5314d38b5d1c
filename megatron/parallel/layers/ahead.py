"""Gathers of a block's matrices that travel under the product before theirs (Singh et al. 2023, arXiv:2305.13525).

A pass through a block takes its matrices in the order of the pass before it, which was noted. Each product begins the
gather of the next matrix, then waits for its own. One matrix is ahead at most. A gather ends within the pass that began
it, also where that raises, so no update of the weights, no other micro-batch and no recomputation comes between. The
first matrix of a block has none to travel under: a block waits for its updated weights when it begins.

A pass that takes another matrix than the one before it did waits for the gather in vain, and gathers at each product
from there on. All ranks of an axis make the same passes, so they begin the same gathers."""

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..layout.mesh import Axis
from ..messages.account import counted_for, here


def begin_whole(own_RM: Tensor, axis: Axis) -> tuple[Tensor, dist.Work]:
    """(the rows of all ranks [N, M], in the order of the ranks, the message to wait for)."""
    whole_NM = own_RM.new_empty((own_RM.shape[0] * axis.size, *own_RM.shape[1:]))
    return whole_NM, dist.all_gather_into_tensor(whole_NM, own_RM.contiguous(), group=axis.group, async_op=True)


@dataclass(frozen=True, eq=False)
class _Taken:
    """A matrix that a product took, and the layer whose messages it counts for."""

    own_RM: nn.Parameter | None  # None: made for this pass
    axis: Axis
    layer: str

    def same(self, other: "_Taken") -> bool:
        return self.own_RM is other.own_RM and (self.axis, self.layer) == (other.axis, other.layer)


class _Pass:
    """The matrices that one pass has taken, and the gather that is ahead."""

    def __init__(self, before: Sequence[_Taken]) -> None:
        self.before, self.taken = before, list[_Taken]()
        self.ahead: tuple[Tensor, dist.Work] | None = None

    def whole(self, own_RM: Tensor, axis: Axis) -> Tensor:
        """The rows of all ranks. Begins to gather the next matrix."""
        mine, at = _Taken(own_RM if isinstance(own_RM, nn.Parameter) else None, axis, here()), len(self.taken)
        if self.before[at : at + 1] and not self.before[at].same(mine):
            self.before = ()
            self.end()
        self.taken.append(mine)
        whole_NM, gathering = self.ahead or begin_whole(own_RM, axis)
        self.ahead = None
        for following in self.before[at + 1 : at + 2]:
            if following.own_RM is not None:
                with counted_for(following.layer):
                    self.ahead = begin_whole(following.own_RM, following.axis)
        gathering.wait()
        return whole_NM

    def end(self) -> None:
        if self.ahead is not None:
            self.ahead[1].wait()
        self.ahead = None


_PASS: ContextVar[_Pass | None] = ContextVar("pass", default=None)


def whole_for_product(own_RM: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks, for a product in a forward pass."""
    running = _PASS.get()
    if running is not None:
        return running.whole(own_RM, axis)
    whole_NM, gathering = begin_whole(own_RM, axis)
    gathering.wait()
    return whole_NM


def gather_ahead(block: nn.Module, again: bool) -> None:
    """Make gathers of the block's forward passes travel under its products. Call it before recomputation is added.

    Args:
        again: also in repetitions. Selective ones keep the products, and may send nothing that was not sent before.
    """
    plain, orders = block.forward, dict[tuple[bool, bool], list[_Taken]]()

    @functools.wraps(plain)
    def forward(*args: Any, **options: Any) -> Any:
        repeats = torch._C._current_autograd_node() is not None
        if repeats and not again:
            return plain(*args, **options)
        key = repeats, torch.is_grad_enabled()  # a repetition may end early, and decoding take another way
        running = _Pass(orders.get(key, ()))
        token = _PASS.set(running)
        try:
            return plain(*args, **options)
        finally:
            _PASS.reset(token)
            orders[key] = running.taken
            running.end()

    block.forward = forward
