"""Purpose of the tensors that an engine keeps: weights, gradients, masters, moments, buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from megatron.engine.parts import TEACHER as TEACHER_PART

from .storage_counter import StorageCounter

WEIGHTS, GRADIENTS, MASTERS, MOMENTS = "weights", "gradients", "masters", "moments"
GATHERED, BUCKETS, BUFFERS, TEACHER = "gathered weights", "buckets", "buffers", "teacher"

# Words in the names of DeepSpeed's attributes, and what such tensors are for. The first that fits counts.
_WORDS = (
    ("ipg", BUCKETS),
    ("bucket", BUCKETS),
    ("temp_grad", BUCKETS),
    ("grad", GRADIENTS),
    ("single_partition", MASTERS),
    ("fp32", MASTERS),
    ("bit16", WEIGHTS),
    ("fp16", WEIGHTS),
    ("bf16", WEIGHTS),
)


def mark_states(ledger: StorageCounter, engine: Any) -> None:
    """Mark the purpose of an engine's tensors in the ledger. Called again after each step, since some are made late.

    Args:
        engine: a `BaseEngine`.
    """
    zero = engine.deepspeed.optimizer
    for name, tensor in _reachable(vars(zero)) if hasattr(zero, "__dict__") else ():
        part = next((part for word, part in _WORDS if word in name.lower()), None)
        if part and not ledger.part_of(tensor):
            ledger.mark(tensor, part)
    for group in engine.optimizer.param_groups:
        for tensor in group["params"]:
            ledger.mark(tensor, MASTERS)
            for value in engine.optimizer.state.get(tensor, {}).values():
                if isinstance(value, Tensor):
                    ledger.mark(value, MOMENTS)
    module: nn.Module = engine.deepspeed.module
    for parameter in module.parameters():
        for weight in (parameter, getattr(parameter, "ds_tensor", None)):
            if weight is not None:
                ledger.mark(weight, WEIGHTS)
    teacher = engine.parts.get(TEACHER_PART)
    if teacher is not None:
        for weight in teacher.model.parameters():
            ledger.mark(weight, TEACHER)
    for buffer in (*module.buffers(), *engine.state.buffers):
        ledger.mark(buffer, BUFFERS)


def watch_gradients(ledger: StorageCounter, engine: Any) -> None:
    """Mark each gradient as soon as it exists."""

    def mark(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.mark(parameter.grad, GRADIENTS)

    for parameter in engine.deepspeed.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark)


def _reachable(values: dict[str, Any], depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """The tensors in attributes and in their lists and dictionaries, with the attribute's name."""
    for name, value in values.items():
        yield from ((name, tensor) for tensor in _tensors(value, depth))


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, depth - 1)
    elif depth and type(value).__module__.startswith("deepspeed") and type(value).__name__ == "IPGBucket":
        for each in vars(value).values():
            yield from _tensors(each, depth - 1)
