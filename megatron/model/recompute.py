"""Activation checkpointing: what is kept for the backward pass and what is computed again.

Nothing random depends on call order (dropout is keyed), so no generator state is saved or restored. Decisions, such as
which experts a token uses, are kept and not made again: one that fell otherwise would change the shapes of what
follows.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
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

RECOMPUTE = "recompute"  # what a profiler's trace calls a repetition

T = TypeVar("T")


class _Decisions:
    """The decisions of one checkpointed forward pass, and how many of them its repetition has taken.

    Args:
        modes: of selective recomputation, which keeps results of matrix products and attention: torch's for the first
            pass and for its repetition. Each counts operations, to tell which result belongs to which.
    """

    def __init__(self, modes: tuple[Any, Any] | None = None) -> None:
        self.modes = modes
        self.made: list[Any] = []
        self.taken: int | None = None  # None: not repeating


_DECISIONS: ContextVar[_Decisions | None] = ContextVar("decisions", default=None)
_WHOLE: ContextVar[bool] = ContextVar("whole", default=False)  # inside of `kept`


def decide_once(make: Callable[[], T]) -> T:
    """What `make` gives. Where a forward pass is repeated for its gradient, what it gave the first time."""
    decisions = _DECISIONS.get()
    if decisions is None:
        return make()
    if decisions.taken is None:
        decisions.made.append(make())
        return decisions.made[-1]
    decisions.taken += 1
    return decisions.made[decisions.taken - 1]


def keep_whole(make: Callable[[], T]) -> T:
    """What `make` gives, kept as a whole by selective recomputation, with nothing that it is made of.

    For attention that is written out: of its products, those of queries and keys are larger than anything else.
    """
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
        for operation, times in operations.items():  # or what follows would be given results of these
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
        # A profiler is to tell what runs again from what runs for the first time. Without one a mark only costs time.
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
    """The contexts of a checkpointed forward pass and of its repetition, around those that `make_inner` makes."""
    inner = make_inner()
    decisions = _Decisions(None if isinstance(inner[0], nullcontext) else inner)
    return _Deciding(decisions, False, inner[0]), _Deciding(decisions, True, inner[1])


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """selective: keep results of matrix products and attention. Recompute norms, activations and the rest.

    Collectives run again too: they write into buffers, and what is kept must not be written to.
    """
    keep = operation in _KEPT and not _WHOLE.get()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_activations(block: nn.Module, index: int, options: ActivationCheckpointing) -> None:
    """Make the block recompute its activations, as `options` say for the block of this index."""
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
