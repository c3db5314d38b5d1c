"""Kernels of flash-linear-attention as operations of compiled blocks."""

from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from megatron.config.arithmetic.machine import installed

TESTED = "0.6.0"  # the version whose backward passes `operations` are given


def compiles() -> bool:
    """Whether the installed version is the one whose backward passes can be operations."""
    try:
        return installed("fla") and metadata.version("fla-core") == TESTED  # has `fla.ops`
    except metadata.PackageNotFoundError:  # an older version, or a folder of its files
        return False


def _given(inputs: tuple[Any, ...]) -> list[Tensor]:
    return [each for each in inputs if each is not None and each.is_floating_point()]


def _like(given: Tensor) -> Tensor:
    return torch.empty_like(given, memory_format=torch.contiguous_format)


def operations(
    name: str, forward: Callable[..., Any], gradient: Callable[..., tuple[Tensor, ...]], like: tuple[int, ...]
) -> tuple[Any, Any]:
    """Kernels as two operations. One gives a result of the inputs. The other gives gradients of floating-point inputs,
    which come before others, from the result's gradient and the inputs. Results are contiguous.

    Args:
        forward, gradient: by kernels. A second result of `forward`, which has no gradient, is in the place of the last
            input in `gradient`.
        like: the inputs whose shapes and types the results have.
    """

    def gradients(ctx: Any, of_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        found = backward(of_y.contiguous(), *ctx.saved_tensors)
        return *found, *(None for _ in ctx.saved_tensors[len(found) :])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*((*inputs[:-1], output[1]) if like[1:] else inputs))

    def results(*inputs: Any) -> Any:
        made = tuple(_like(inputs[each]) for each in like)
        return made if like[1:] else made[0]

    operation, backward = (
        torch.library.custom_op(f"deepy::{own}", function, mutates_args=(), device_types="cuda")
        for own, function in ((name, forward), (f"{name}_gradient", gradient))
    )
    operation.register_fake(results)
    backward.register_fake(lambda _, *inputs: tuple(map(_like, _given(inputs))))
    operation.register_autograd(gradients, setup_context=keep)
    return operation, backward
