"""torch.compile of single blocks: which runs use it, and why.

A block is the unit because all blocks of a kind share one compilation, because the pipeline cuts between blocks, and
because what surrounds them (embedding, fused loss) has nothing to fuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast
from warnings import warn

import torch
from torch import nn

from megatron.config import Config
from megatron.config.pattern import BlockPattern

from .block import Block, BlockState
from .options import kind_of
from .stream import Stream


class Compilable(Protocol):
    """A mixer of a kind that `compiles`."""

    def prepare(self, stream: Stream) -> None:
        """Make what the stream remembers for its layers, outside of the compiled part."""


def choose_compilation(config: Config, device: torch.device | str) -> tuple[bool, str]:
    """Whether the blocks of a run are compiled, and the reason."""
    wanted, kind = config.training.compile, torch.device(device).type
    if wanted == "off":
        return False, "training.compile: off"
    if kind == "meta":
        return False, "nothing is computed on the meta device"
    if config.parallel.tensor > 1:
        return False, "collectives of tensor parallelism cut a block into pieces too small to gain"
    if config.parallel.context > 1:
        return False, "collectives of context parallelism cut attention into pieces"
    if config.training.sequence_chunks > 1:
        return False, "each chunk of a sequence has other keys before it, and would be compiled anew"
    model = config.model
    if model.dropout > 0 or model.attention.dropout > 0 or any("dropout" in each for each in model.variants.values()):
        return False, "dropout has its own keys in each block, so each would be compiled anew"
    if not any(_fits(config, block) for block in model.blocks):
        return False, "no block is made of attention and mlp"
    if config.training.activation_checkpointing.mode == "selective":
        return False, "selective recomputation chooses among single operations, which a compiled block no longer has"
    if config.zero.stage == 3:
        return False, "ZeRO 3 gathers parameters in hooks between the operations of a block"
    if wanted == "layer":
        return True, "training.compile: layer"
    if kind == "cuda":
        return True, "auto: on GPUs norms, activations, rotary and residual sums become few kernels"
    return False, "auto: on CPU it takes longer than it saves in most runs"


def _fits(config: Config, block: BlockPattern) -> bool:
    """Blocks of attention and mlp; other layers have loops or kernels of their own."""
    return bool(block.mixers) and all(kind_of(config.model, each).compiles for each in block.kinds)


def describe_compile(config: Config, device: torch.device | str) -> str:
    """One line for people: the choice and its reason."""
    chosen, reason = choose_compilation(config, device)
    return f"torch.compile: {'blocks of attention and mlp' if chosen else 'off'} ({reason})"


def compile_forward(block: Block, config: Config, device: torch.device | str) -> None:
    """Compile the block's forward pass where the run does; decoding, whose shapes change, stays as it is.

    Call it before recomputation is added: a block that runs again runs its compiled form.
    """
    if not choose_compilation(config, device)[0] or not _fits(config, block.pattern):
        return
    plain = block.forward
    fast = _or_plain(torch.compile(plain, dynamic=False, options=_options(config, device)), plain)

    prepare, module = cast(Compilable, block.mixer).prepare, cast(nn.Module, block)

    def forward(stream: Stream, state: BlockState | None = None) -> Stream:
        if state is not None:
            return plain(stream, state)
        prepare(stream)
        return fast(stream)

    module.forward = forward


def _options(config: Config, device: torch.device | str) -> dict[str, Any] | None:
    """What inductor needs to be told.

    Two biases whose gradients are the same sum, as those of a parallel residual, become one C++ loop that stores it
    twice; torch 2.13 then declares the number of a narrower type twice, which no compiler takes. So no loops are joined
    side by side.
    """
    narrow = torch.device(device).type == "cpu" and config.precision.compute != "fp32"
    return {"cpp.max_horizontal_fusion_size": 1} if narrow else None


def _or_plain(fast: Callable[[Stream], Stream], plain: Callable[[Stream], Stream]) -> Callable[[Stream], Stream]:
    """A compiled pass, and the plain one from the first time on that the compiler fails, which is said in one line."""
    failed = False

    def forward(stream: Stream) -> Stream:
        nonlocal failed
        if not failed:
            try:  # of the backward pass, too: torch would compile it when it is first run
                with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                    return fast(stream)
            except torch._dynamo.exc.TorchDynamoException as error:
                failed = True
                reason = " ".join(str(error).split())[:160]
                warn(f"torch.compile failed, so blocks run as they are: {type(error).__name__}: {reason}", stacklevel=2)
        return plain(stream)

    return forward
