"""torch.compile of single blocks: which runs use it, and why.

A block is the unit because all blocks of a kind share one compilation, because the pipeline cuts between blocks, and
because embedding and fused loss have nothing to fuse. Of a block whose mixer or feed-forward has loops or kernels of
its own, the other half is compiled. A layer whose kernels are operations of a graph has `compiles`: a block of such
layers is compiled as a whole. Of each layer the methods in its `compiled_parts` are compiled: elementwise work
between its products, which reads no parameter by itself and sends nothing. Where
collectives, hooks or chunks cut blocks, only these parts are compiled.

Compiled blocks as CUDA graphs (`training.cuda_graphs`): each pass of a block is recorded once, then replayed, so
that the host launches one graph where it launched some thirty kernels.

A graph reads and writes the memory that it was recorded with. torch's compiler does the recording (its "trees" of
graphs, a path for the blocks in their order). It relies on rules here and in `config/rules/gpu.py`:

* Weights stay where they are. DeepSpeed moves them into its flat tensors before the first pass. ZeRO 3 and offloading,
  which move them later, are refused.
* Gradients leave the graph's memory, which the next replay overwrites while DeepSpeed still sums them: a copy of 16
  bits per weight.
* `begin_pass` marks a new pass through the model: activations of the pass before (of an evaluation, which no backward
  pass frees) may be overwritten then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.arithmetic.pipelines import is_split
from megatron.config.pattern import BlockPattern, Kind
from megatron.parallel.fallback import Fallback, lower_backward_at_once

from ..block import Block, BlockState
from ..options import kind_of, layer_class
from ..stream import Stream

T = TypeVar("T")
Extent = Literal["off", "parts", "blocks"]


class Compilable(Protocol):
    """A mixer of a kind that `compiles`."""

    def prepare(self, stream: Stream) -> None:
        """Make what the stream remembers for its layers, outside of the compiled part."""


def choose_compilation(config: Config, device: torch.device | str) -> tuple[Extent, str]:
    """How much of the blocks of a run is compiled, and the reason."""
    wanted, kind = config.training.compile, torch.device(device).type
    if wanted == "off":
        return "off", "training.compile: off"
    if kind == "meta":
        return "off", "nothing is computed on the meta device"
    if is_split(config.parallel, config.training.accumulation or 1):
        return "off", "the pipeline's schedule computes gradients of weights later"
    if wanted == "auto" and kind != "cuda":
        return "off", "auto: on CPU it gains nothing, or too little for its start and memory"
    kinds = {kind for block in config.model.blocks for kind in block.kinds}
    if not any(hasattr(layer_class(config.model, kind), "compiled_parts") for kind in kinds):
        return "off", "no layer has parts that are compiled"
    cut = _cut_by(config)
    if cut:
        return "parts", cut
    if wanted == "layer":
        return "blocks", "training.compile: layer"
    return "blocks", "auto: on GPUs norms, activations, rotary and residual sums become few kernels"


def _cut_by(config: Config) -> str | None:
    """The reason why a block is not compiled as a whole."""
    if config.parallel.tensor * config.parallel.columns > 1:
        return "collectives of tensor parallelism cut blocks"
    if config.parallel.depth > 1:
        return "matrices are gathered inside of blocks"
    if config.parallel.context > 1:
        return "collectives of context parallelism cut attention"
    if config.training.sequence_chunks > 1:
        return "each chunk of a sequence has other keys before it, and would be compiled again"
    model = config.model
    if model.dropout > 0 or model.attention.dropout > 0 or any("dropout" in each for each in model.variants.values()):
        return "dropout has its own keys in each block, so each would be compiled again"
    if config.training.activation_checkpointing.mode == "selective":
        return "selective recomputation chooses among single operations, which a compiled block no longer has"
    if config.zero.stage == 3:
        return "ZeRO 3 gathers parameters in hooks between the operations of a block"
    return None


def _compiles(config: Config, kinds: Iterable[Kind]) -> bool:
    """Whether these are kinds without loops and kernels of their own."""
    found = list(kinds)
    return bool(found) and all(kind_of(config.model, each).compiles for each in found)


def _fits(config: Config, block: BlockPattern) -> bool:
    return bool(block.mixers) and _compiles(config, block.kinds)


def _whole(config: Config, block: Block) -> bool:
    """Whether a block is compiled as a whole: by its kinds, or by its layers, with the kernels that they have."""
    able = all(getattr(layer, "compiles", False) for _, layer in block.layers())
    return _fits(config, block.pattern) or (bool(block.pattern.mixers) and not block.pattern.side and able)


def _halves(config: Config, block: BlockPattern) -> list[str]:
    """The methods of a block that add one branch, of whatever kind the other is."""
    if config.model.residual.form == "parallel" or _fits(config, block):
        return []
    mixes = not block.side and _compiles(config, block.mixers)
    feeds = block.ffn is not None and _compiles(config, [block.ffn])
    return ["mixed"] * mixes + ["fed"] * feeds


def describe_compile(config: Config, device: torch.device | str) -> str:
    """One line for people: the choice and its reason."""
    extent, reason = choose_compilation(config, device)
    whole = all(_fits(config, block) for block in config.model.blocks)
    blocks = "blocks" if whole else "blocks of layers that compile, and parts of others"
    what = {"off": "off", "parts": "parts of layers", "blocks": blocks}[extent]
    return f"torch.compile: {what} ({reason})" + (", as CUDA graphs" if graphs(config, device) else "")


def graphs(config: Config, device: torch.device | str) -> bool:
    """Whether compiled blocks are CUDA graphs."""
    return config.training.cuda_graphs and torch.device(device).type == "cuda"


def compile_forward(block: Block, config: Config, device: torch.device | str) -> None:
    """Compile the block's forward pass, or parts of it, where the run does. Decoding, whose shapes change, stays as it
    is.

    Call it before recomputation is added: a block that runs again runs its compiled form."""
    extent, _ = choose_compilation(config, device)
    if extent == "off":
        return
    whole = extent == "blocks" and _whole(config, block)
    options = _options(config, device)
    if whole and not _fits(config, block.pattern):
        options = _sum_in_groups(block, options, device)
    lower_backward_at_once()

    def compiled(plain: Callable[..., T], dynamic: bool | None = False) -> Callable[..., T]:
        return Fallback("blocks run as they are").of(torch.compile(plain, dynamic=dynamic, options=options), plain)

    if graphs(config, device):
        gradients_leave_graphs(block)
    if whole:
        _compile_whole(block, compiled)
        return
    halves = _halves(config, block.pattern) if extent == "blocks" else []
    for name in halves:
        _compile_half(block, name, compiled)
    own = (cast(nn.Module, block.mixer if name == "mixed" else block.ffn) for name in halves)
    inside = [module for layer in own for module in layer.modules()]
    for module in block.modules():
        for name in () if module in inside else getattr(module, "compiled_parts", ()):
            setattr(module, name, compiled(getattr(module, name), dynamic=None))  # the rows of an expert change


def _compile_whole(block: Block, compiled: Callable) -> None:
    plain = block.forward
    fast = compiled(plain)
    prepare, module = cast(Compilable, block.mixer).prepare, cast(nn.Module, block)

    def forward(stream: Stream, state: BlockState | None = None) -> Stream:
        if state is not None:
            return plain(stream, state)
        prepare(stream)
        return fast(stream)

    module.forward = forward


def _compile_half(block: Block, name: str, compiled: Callable) -> None:
    """Compile one half. Channels that it makes have new names."""
    plain: Callable[[Tensor, Stream, BlockState], tuple[Tensor, Stream]] = getattr(block, name)
    mixes = name == "mixed"

    def written(x: Tensor, stream: Stream) -> tuple[Tensor, dict[str, Tensor]]:
        x, after = plain(x, stream, BlockState())
        return x, {key: each for key, each in after.channels.items() if key not in stream.channels}

    fast = compiled(written)

    def half(x: Tensor, stream: Stream, state: BlockState) -> tuple[Tensor, Stream]:
        if (state.mixer if mixes else state.ffn) is not None:
            return plain(x, stream, state)
        if mixes:
            cast(Compilable, block.mixer).prepare(stream)
        x, made = fast(x, stream)
        return x, stream.with_channels(made) if made else stream

    setattr(block, name, half)


def _options(config: Config, device: torch.device | str) -> dict[str, Any] | None:
    """Options of inductor.

    Two biases whose gradients are the same sum, as with a parallel residual, become one C++ loop that stores it twice.
    With torch 2.13 that loop declares the number of a narrower type twice, which no compiler accepts. So no loops are
    joined.

    On GPUs inductor sums the gradients of a norm's weight and bias in its loop over channels ("mix order"). With two
    norms of one input, another loop then reads the same tensors for the input's gradient. So this saves no bytes, and
    each of the four sums is finished by two kernels in place of one."""
    if torch.device(device).type == "cpu":
        return {"cpp.max_horizontal_fusion_size": 1} if config.precision.compute != "fp32" else None
    options: dict[str, Any] = {"triton.cudagraphs": True} if graphs(config, device) else {}
    residual = config.model.residual
    two = residual.form == "parallel" and not residual.shared_norm
    if two and MIX_ORDER in torch._inductor.list_options():
        options[MIX_ORDER] = False
    return options or None


MIX_ORDER, READS, LENGTH = "triton.mix_order_reduction", "realize_acc_reads_threshold", "realize_opcount_threshold"


def _sum_in_groups(block: Block, options: dict[str, Any] | None, device: torch.device | str) -> dict[str, Any] | None:
    """Sum gradients of norms as their layers sum gradients of vectors (`over_tokens`). On GPUs inductor then stores no
    tensor that only such a sum reads, whatever it is made of, and no part of a long sum (a convolution).

    Returns:
        options: of inductor.
    """
    for norm in (block.mixer_norm, block.ffn_norm):
        if norm is not None:
            norm.grouped = True
    if torch.device(device).type == "cpu":
        return options
    own = {MIX_ORDER: False, READS: 64, LENGTH: 100}
    return {**(options or {}), **{name: own[name] for name in own if name in torch._inductor.list_options()}}


def gradients_leave_graphs(block: nn.Module) -> None:
    """Give autograd a copy of each gradient of the block's parameters."""

    def elsewhere(gradient: Tensor) -> Tensor:
        return gradient.clone()

    for parameter in block.parameters():
        if parameter.requires_grad:
            parameter.register_hook(elsewhere)


def begin_pass() -> None:
    """The memory of the pass before may be used again."""
    torch.compiler.cudagraph_mark_step_begin()
