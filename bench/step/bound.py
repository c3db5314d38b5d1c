"""The part of a training step that every program has to do, as a contender: a lower bound of a step's time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from bench.step.contenders import Ours
from bench.step.setup import Setup

NEEDED = {  # products, attention's kernel in one, and the update of weights and moments
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_fused_adamw_",
}


class Calls(TorchDispatchMode):
    """Calls of the needed operations inside this context, on memory of their own.

    Operands of one place, shape, strides and type share memory, so the processor's caches have more of them than in a
    step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple, dict[str, Any]]] = []
        self._memory: dict[tuple, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket.__name__ in NEEDED:
            leaves, form = tree_flatten((args, kwargs))
            given = [self._like(place, each) if isinstance(each, Tensor) else each for place, each in enumerate(leaves)]
            self.made.append((function, *tree_unflatten(given, form)))
        return function(*args, **kwargs)

    def _like(self, place: int, tensor: Tensor) -> Tensor:
        """Ones, for each place of a call others: a result must not overwrite an operand."""
        key = place, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._memory:
            size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
            self._memory[key] = tensor.new_ones(size).as_strided(tensor.shape, tensor.stride())
        return self._memory[key]

    def again(self) -> None:
        """Repeat the calls."""
        for function, args, kwargs in self.made:
            function(*args, **kwargs)


class Bound:
    """A contender whose step is only the needed operations of our step, in its order."""

    def __init__(self, setup: Setup):
        ours = Ours(setup)
        ours.step(0)  # the first step makes the moments
        with Calls() as self.calls:
            ours.step(1)
        ours.close()

    @torch.no_grad()
    def step(self, step: int) -> tuple[float, float]:
        self.calls.again()
        return 0.0, 0.0

    def close(self) -> None:
        pass
