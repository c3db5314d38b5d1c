"""Activation checkpointing: what is kept for the backward pass and what is computed again.

Nothing random depends on call order (dropout is keyed), so no generator state is saved or restored.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron.config.sections.layout import ActivationCheckpointing

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _policy(_context, operation, *_args, **_kwargs) -> CheckpointPolicy:
    """selective: keep results of matrix products and attention; recompute norms, activations and the rest.

    Collectives run again too: they write into buffers, and what is kept must not be written to.
    """
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(block: nn.Module, index: int, options: ActivationCheckpointing) -> nn.Module:
    """Make the block recompute its activations, as `options` say for the block of this index."""
    if options.mode == "none" or (options.mode == "full" and index % options.every):
        return block
    arguments = {"use_reentrant": False, "preserve_rng_state": False}
    if options.mode == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    plain = block.forward

    @functools.wraps(plain)
    def forward(stream, state=None):
        if not torch.is_grad_enabled() or state is not None:
            return plain(stream, state)
        return checkpoint(plain, stream, **arguments)

    block.forward = forward
    return block
