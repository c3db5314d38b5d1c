"""Activation checkpointing: which tensors are kept for the backward pass, and which are computed again.

Random numbers do not depend on call order (dropout is keyed), so no generator state is saved or restored. Decisions,
such as the experts of a token, are kept and not made again: another decision would change the shapes of later tensors.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron.config.sections.layout import ActivationCheckpointing

from .stream import Stream

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}

RECOMPUTE = "recompute"  # name of a repetition in a profiler's trace

T = TypeVar("T")


@dataclass(eq=False)
class _Decisions:
    """The decisions of one checkpointed forward pass, and the number of them that its repetition has taken.

    Attributes:
        modes: torch's modes of selective recomputation, for the first pass and for its repetition. Each counts
            operations, by which kept results are identified.
    """

    modes: tuple[Any, Any] | None = None
    made: list[Any] = field(default_factory=list)
    taken: int | None = None  # None: not repeating


_DECISIONS: ContextVar[_Decisions | None] = ContextVar("decisions", default=None)
_WHOLE: ContextVar[bool] = ContextVar("whole", default=False)  # inside of `kept`


def decide_once(make: Callable[[], T]) -> T:
    """`make()`. A forward pass that is repeated for its gradient gets the first result."""
    decisions = _DECISIONS.get()
    if decisions is None:
        return make()
    if decisions.taken is None:
        decisions.made.append(make())
        return decisions.made[-1]
    decisions.taken += 1
    return decisions.made[decisions.taken - 1]


def keep_whole(make: Callable[[], T]) -> T:
    """`make()`. Selective recomputation keeps its result, and none of its inner products.

    For attention that is written out, whose products of queries and keys are larger than all other tensors."""
    decisions = _DECISIONS.get()
    if decisions is None or decisions.modes is None:
        return make()
    first, again = decisions.modes

    def made_of() -> tuple[T, Counter]:
        before, token = Counter(first.func_counter), _WHOLE.set(True)
        try:
            return make(), Counter(first.func_counter) - before
        finally:
            _WHOLE.reset(token)

    made, operations = decide_once(made_of)
    if decisions.taken is not None:
        for operation, times in operations.items():  # or later operations would get results of these
            again.func_counter[operation] += times
    return made


def repeating() -> bool:
    """Whether this forward pass is a repetition, whose numbers have been counted already."""
    decisions = _DECISIONS.get()
    return decisions is not None and decisions.taken is not None


class _Deciding:
    """The context of a checkpointed forward pass, or of its repetition, around another one. May be entered again."""

    def __init__(self, decisions: _Decisions, repeats: bool, inner: AbstractContextManager):
        self.decisions, self.repeats, self.inner = decisions, repeats, inner
        self.mark: AbstractContextManager = nullcontext()

    def __enter__(self) -> None:
        self.decisions.taken = 0 if self.repeats else None
        self.token = _DECISIONS.set(self.decisions)
        # The mark shows repetitions in a profiler's trace. Without a profiler it only costs time.
        marked = self.repeats and torch.autograd._profiler_enabled()
        self.mark = torch.profiler.record_function(RECOMPUTE) if marked else nullcontext()
        self.mark.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        _DECISIONS.reset(self.token)
        try:
            return self.inner.__exit__(*error)
        finally:
            self.mark.__exit__(None, None, None)


def deciding(make_inner: Callable[[], tuple] = lambda: (nullcontext(), nullcontext())) -> tuple[_Deciding, _Deciding]:
    """The contexts of a checkpointed forward pass and of its repetition, around the contexts of `make_inner`."""
    inner = make_inner()
    decisions = _Decisions(None if isinstance(inner[0], nullcontext) else inner)
    return _Deciding(decisions, False, inner[0]), _Deciding(decisions, True, inner[1])


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """selective: keep results of matrix products and attention. Recompute norms, activations and the rest.

    Collectives run again too: they write into buffers, and kept tensors must not change."""
    keep = operation in _KEPT and not _WHOLE.get()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_activations(block: nn.Module, index: int, options: ActivationCheckpointing) -> None:
    """Make the block of this index recompute its activations by `options`."""
    if options.mode == "none" or (options.mode == "full" and index % options.every):
        return
    contexts: Callable[[], tuple[_Deciding, _Deciding]] = deciding
    if options.mode == "selective":
        selective = functools.partial(create_selective_checkpoint_contexts, _policy)
        contexts = functools.partial(deciding, selective)
    plain = block.forward

    @functools.wraps(plain)
    def forward(stream: Stream, state: Any = None) -> Stream:
        if not torch.is_grad_enabled() or state is not None:
            return plain(stream, state)
        return checkpoint(plain, stream, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    block.forward = forward
