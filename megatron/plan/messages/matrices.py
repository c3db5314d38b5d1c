"""Messages in closed form of optimizers of whole matrices (parts to their owners, updates back), and of shared rows.

The layout and DeepSpeed 0.19.8's order of parameters determine the elements of each rank. The optimizer computes the
rest from them at its start (`optimizers.whole`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from megatron.config import Config
from megatron.config.arithmetic.recurrence import Passes, core_of
from megatron.model.block import Block
from megatron.model.costs.traffic import ONCE, SIZES
from megatron.model.embedding_and_head import Embedding, Head
from megatron.parallel.layers.parameters import is_spread, logical_of, shard_index, shard_start
from megatron.parallel.layout.mesh import ALONE, Axis, Mesh
from megatron.parallel.layout.precision import type_name
from megatron.parallel.messages.account import group_name
from megatron.parallel.messages.traffic import Call, Messages

from ...engine.deepspeed.options import zero_stage
from ...engine.optimizers.matrix import MatrixOptimizer
from ...engine.optimizers.whole import Held, UnitPart, WholeTensors

ALIGNMENT = 2  # elements: DeepSpeed's nccl_start_alignment_factor, for each rank's part of a group
SUB_GROUP = 1_000_000_000  # elements of a rank: DeepSpeed's sub_group_size at ZeRO 3
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


def padded(elements: int, ranks: int) -> int:
    """Elements of a group's flat buffer, divided into equal, aligned parts of the ranks."""
    unit = ALIGNMENT * ranks
    return -(-elements // unit) * unit


def matrix_messages(
    config: Config, mesh: Mesh, optimizer_at: Callable[[Mesh], MatrixOptimizer]
) -> Iterator[tuple[Call, int, int]]:
    """The all-to-alls of an update.

    Args:
        mesh: of the rank that sends, without process groups.
        optimizer_at: the optimizer of another rank of this stage, without values.
    """
    layout, at = mesh.layout, mesh.at
    places = layout.stage_ranks(at)
    if len(places) == 1:
        return
    ranks = tuple(map(layout.rank, places))
    optimizer = optimizer_at(mesh)
    held = [_held(config, Mesh.describe(layout, rank), optimizer_at) for rank in ranks]
    axis = Axis(places.index(at), len(places), None, ranks)
    for own in zip(*held, strict=True):
        wholes = WholeTensors(own, axis)
        masters = "fp32"
        there = masters if optimizer.travels is None else type_name(optimizer.travels)
        for numbers in wholes.rounds:
            to_owner = [(p.rank, wholes.owners[p.unit], p) for number in numbers for p in wholes.sources[number]]
            back = [(wholes.owners[p.unit], p.rank, p) for number in numbers for p in wholes.parts[number]]
            ways = [(to_owner, there), *([(to_owner, masters)] if optimizer.reads_weights else []), (back, masters)]
            for messages, dtype in ways:
                travels = [each for each in messages if each[0] != each[1]]
                if travels:
                    call = Call("update", "", group_name(ranks, layout, at), len(ranks), "all_to_all", dtype)
                    yield call, 1, _sent(travels, axis.rank) * WIDTHS[dtype]


def _sent(messages: list[tuple[int, int, UnitPart]], rank: int) -> int:
    return sum(part.count for source, _, part in messages if source == rank)


def _held(config: Config, mesh: Mesh, optimizer_at: Callable[[Mesh], MatrixOptimizer]) -> list[list[Held]]:
    """A rank's parts of the matrices, with a list for each step of its optimizer. See `EngineState.held`."""
    stage = zero_stage(config, mesh.layout)
    found: list[list[Held]] = []
    for group in optimizer_at(mesh).param_groups:
        if not group["matrix"]:
            continue
        parameters = group["params"]
        axis = mesh.expert_data if is_spread(parameters[0]) else mesh.replicas
        if stage == 3:
            found += [_shares(each, axis) for each in _sub_groups(parameters, axis.size)]
        elif stage == 0:
            found.append([_piece(each, 0, each.numel(), flat, 0) for flat, each in enumerate(parameters)])
        else:
            found.append(_flattened(parameters, axis))
    return found


def _piece(parameter: nn.Parameter, start: int, count: int, flat: int, place: int) -> Held:
    return Held(
        logical_of(parameter), shard_index(parameter), shard_start(parameter) + start, count, flat, place
    )  # fmt: skip


def _flattened(parameters: list[nn.Parameter], axis: Axis) -> list[Held]:
    """ZeRO 1 and 2: each rank has an equal part of a group's buffer."""
    share = padded(sum(each.numel() for each in parameters), axis.size) // axis.size
    begin, found, place = axis.rank * share, [], 0
    for each in parameters:
        first, last = max(begin, place), min(begin + share, place + each.numel())
        if first < last:
            found.append(_piece(each, first - place, last - first, 0, first - begin))
        place += each.numel()
    return found


def _shares(parameters: list[nn.Parameter], axis: Axis) -> list[Held]:
    """ZeRO 3: each rank has an equal part of each parameter."""
    found, place = [], 0
    for each in parameters:
        share = -(-each.numel() // axis.size)
        count = min(share, each.numel() - axis.rank * share)
        if count > 0:
            found.append(_piece(each, axis.rank * share, count, 0, place))
        place += share
    return found


def _sub_groups(parameters: list[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """ZeRO 3 makes a step for each `SUB_GROUP` elements of a rank."""
    shares = [-(-each.numel() // ranks) for each in parameters]
    if sum(shares) <= SUB_GROUP:
        return [parameters]
    found: list[list[nn.Parameter]] = [[]]
    filled = 0
    for each, share in zip(parameters, shares):
        if filled >= SUB_GROUP:
            found.append([])
            filled = 0
        found[-1].append(each)
        filled += share
    return found


@dataclass(frozen=True)
class RowMatrix:
    """A matrix whose rows ranks share, in one forward pass."""

    layer: str  # in accounts
    elements: int  # of this rank's rows
    block: int | None = None  # number of its block, None outside of blocks
    again: bool = True  # whether the backward pass needs the rows


def row_traffic(config: Config, mesh: Mesh, layers: nn.Module, core: Passes = ONCE) -> Messages:
    """Messages of one micro-batch of ranks that share rows of matrices (`parallel/layers/folded.py`, `depth.py`).

    Of a matrix of N M numbers over n ranks, a message has N M / n. The forward pass (and its repetition) sends n - 1 of
    them to the next rank, and receives the same from the previous one. The backward pass does the same, and the same
    in fp32 with the gradients. An embedding's rows are not needed again. The head's are gathered, and their gradients
    scattered. With depth every pass gathers the whole, also where selective recomputation keeps its product, and the
    gradient is scattered.

    Args:
        layers: this rank's, as modules without values.
        core: number of passes through a recurrent core.
    """
    tally, layout, gathers = Messages(), mesh.layout, mesh.layout.depth > 1
    if not layout.shares_rows and not gathers:
        return tally
    ranks = mesh.depth.size if gathers else mesh.context.size
    group = group_name([layout.rank(at) for at in layout.all_experts(mesh.at)], layout, mesh.at)
    dtype, training = config.precision.compute, config.training
    recompute, chunks = training.activation_checkpointing, training.sequence_chunks
    for module in layers.children():
        for each in _matrices(module):
            sent = [("forward", dtype, "all_gather"), ("backward", "fp32", "reduce_scatter")]
            sent += [("backward", dtype, "all_gather")] if each.again else []
            again = recompute.mode == "full" and each.block is not None and each.block % recompute.every == 0
            again |= gathers and recompute.mode == "selective"
            if each.block is not None and (again or chunks > 1):
                sent.append(("recompute", dtype, "all_gather"))
            often = core if each.block in core_of(config.model.blocks) else ONCE
            for phase, kind, operation in sent:
                times = chunks * int(often.total if phase == "forward" else often.backward)
                size = times * each.elements * SIZES[kind]
                if gathers:
                    tally.add(Call(phase, each.layer, group, ranks, operation, kind), times, ranks * size)
                    continue
                for hop in ("send", "recv"):
                    call = Call(phase, each.layer, "context", 2, hop, kind)
                    tally.add(call, times * (ranks - 1), (ranks - 1) * size)
        if isinstance(module, Head) and module.rows.size > 1 and module.weight is not None:
            size = ranks * module.weight.numel() * SIZES[dtype]
            for phase, operation in (("forward", "all_gather"), ("backward", "reduce_scatter")):  # once for all chunks
                tally.add(Call(phase, "head", "context", ranks, operation, dtype), 1, size)
    return tally


def _matrices(module: nn.Module) -> Iterator[RowMatrix]:
    """Matrices of an embedding, of a block, or of the modules that predict further tokens."""
    if isinstance(module, Embedding):
        yield from (RowMatrix("embedding", size, again=False) for size in _sizes(module))
    elif isinstance(module, Block):
        name = ".".join(logical_of(next(module.parameters())).name.split(".")[:2])
        index = int(name.split(".")[1])
        if module.injection is not None:
            yield from (RowMatrix(f"{name}.injection", size, index) for size in _sizes(module.injection))
        for kind, layer in module.layers():
            yield from (RowMatrix(f"{name}.{kind.name}", size, index) for size in _sizes(layer))
            yield from (RowMatrix(f"{name}.{kind.name}", size, index, again=False) for size in _biases(layer))
        for layer in module.side_layers or ():
            yield from (RowMatrix(name, size, index) for size in _sizes(layer, *getattr(layer, "borrowed", ())))
    elif isinstance(module, Head) and module.further is not None:
        for token in module.further.tokens:
            yield from (RowMatrix("head", size) for size in _sizes(cast(nn.Module, token.projection)))
            yield from (RowMatrix("head", size, again=False) for size in _sizes(module.further.table))
            yield from _matrices(cast(nn.Module, token.block))


def _sizes(*modules: nn.Module) -> list[int]:
    """Elements of this rank's rows of each matrix of the modules. Each module counts once."""
    return [cast(Tensor, each.weight).numel() for each in _sharing(*modules)]


def _biases(module: nn.Module) -> list[int]:
    """Elements of this rank's biases of experts that ranks gather."""
    biases = (getattr(each, "bias", None) for each in _sharing(module))
    return [each.numel() for each in biases if each is not None and is_spread(each)]


def _sharing(*modules: nn.Module) -> list[nn.Module]:
    every = dict.fromkeys(each for module in modules for each in module.modules())
    return [each for each in every if getattr(each, "rows", ALONE).size > 1]
