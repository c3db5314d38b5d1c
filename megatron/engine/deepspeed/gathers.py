"""Weights of ZeRO 1 and 2 are gathered while the next forward pass runs.

DeepSpeed gathers all of them at the end of a step. Here each bucket's gather is begun there, and a block waits for its
own buckets before its forward pass. On an accelerator only the current stream waits. The first forward pass begins when
the weights outside of blocks have arrived. Between two steps `EngineState` and `BaseEngine.module` call `settle` before
weights are read or masters are written."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from megatron.model.block import Block
from megatron.parallel.transport.routes import installed_routes
from megatron.parallel.transport.shared_sums import averages

if TYPE_CHECKING:
    from .scattered import Bucket


class LateGathers:
    """Takes over the gathers of an optimizer.

    Args:
        zero: DeepSpeed's optimizer.
        buckets: its parameter groups, in their order.
        sent: the same in the order in which the backward pass completes them.
    """

    def __init__(self, zero: Any, module: nn.Module, buckets: Sequence[Bucket], sent: Sequence[Bucket]) -> None:
        self._flying: dict[int, Any] = {}
        of_parameter = {parameter: number for number, each in enumerate(buckets) for parameter in each.parameters}
        inside = set[nn.Parameter]()
        for block in (each for each in module.modules() if isinstance(each, Block)):
            own = of_parameter.keys() & block.parameters()
            inside |= own
            block.register_forward_pre_hook(lambda *_, own={of_parameter[each] for each in own}: self._wait(own))
        self._first = {number for parameter, number in of_parameter.items() if parameter not in inside}
        places = {id(each): number for number, each in enumerate(buckets)}
        self._turns = sorted((places[id(each)] for each in sent[::-1]), key=lambda number: number not in self._first)
        update, refresh = zero.step, zero.update_lp_params

        def step(*arguments: Any, **options: Any) -> Any:
            with mock.patch.object(sys.modules[type(zero).__module__], "all_gather_dp_groups", self._send):
                return update(*arguments, **options)

        def update_weights() -> None:
            self.settle()
            refresh()

        zero.step, zero.update_lp_params = step, update_weights

    def _send(self, groups_flat: list[Tensor], partitioned_param_groups: Any, dp_process_group: Any, **_: Any) -> None:
        """Replaces DeepSpeed's function, with the same messages in the order of the forward pass."""
        for number in self._turns:
            whole, group = groups_flat[number], dp_process_group[number]
            if dist.get_world_size(group) == 1:
                continue
            own = partitioned_param_groups[number][dist.get_rank(group)]
            late = installed_routes() is None and not averages(group, whole)  # those act while the caller waits
            work = dist.all_gather_into_tensor(whole, own, group=group, async_op=late)
            if work is not None:
                self._flying[number] = work

    def leave(self) -> None:
        """Gather nothing after an update: something else gathers weights when they are needed."""
        self._turns = []

    def begin(self) -> None:
        """A forward pass begins: wait for the weights that no block has."""
        self._wait(self._first)

    def settle(self) -> None:
        """Wait for all weights."""
        self._wait([*self._flying])

    def _wait(self, numbers: Collection[int]) -> None:
        for number in numbers:
            if (work := self._flying.pop(number, None)) is not None:
                work.wait()
