"""Parameters, matrices and activations of each layer on one rank, from the layers' own modules.

The layers are built on the meta device as this rank would have them, so their local sizes are right for every kind.
Equal layers are built once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import nn

from megatron.config import Config
from megatron.config.arithmetic.pipelines import ranks_of_stages
from megatron.config.arithmetic.recurrence import Passes, expected_passes
from megatron.config.teacher import teacher_config
from megatron.config.variants import options_of
from megatron.model.block import block_counts, opens_core
from megatron.model.costs.describe import copies, layers
from megatron.model.costs.traffic import Leave, NotPredicted, TensorAxis, block_sends, tensor_traffic
from megatron.model.counts import Counts
from megatron.model.embedding_and_head import embedding_counts, head_counts, multi_token_counts
from megatron.model.options import kind_of, layer_class
from megatron.model.partition import rank_of
from megatron.model.stack import ModelPlan
from megatron.objectives.named import objective_of
from megatron.parallel.layers.parameters import is_spread, logical_of, shares_rows
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import Role
from megatron.parallel.messages.traffic import SIZES, Call, Tally

from .candidate import Candidate, layout_of

PRODUCTS = (
    Role.HIDDEN,
    Role.OUTPUT,
    Role.ROUTER,
    Role.HEAD,
)  # roles of the matrices that activations are multiplied by


@dataclass(frozen=True)
class Matrix:
    """A product of activations with a weight on this rank: `count` of them, each [tokens * share, columns] times
    [columns, rows]."""

    rows: int
    columns: int
    count: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class RankWeights:
    """Parameters of one rank by type and by the ranks that share their states.

    Attributes:
        expert: of experts that are spread over ranks, and of matrices whose rows ranks share, in the compute type.
    """

    low: int = 0  # in the compute type
    wide: int = 0  # in fp32 in every precision
    expert: int = 0

    def __add__(self, other: RankWeights) -> RankWeights:
        return RankWeights(self.low + other.low, self.wide + other.wide, self.expert + other.expert)

    @property
    def dense(self) -> int:
        return self.low + self.wide

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class Kept:
    """Elements per token that a layer keeps for its backward pass."""

    cut: float  # shared by tensor parallel ranks
    whole: float  # those inside its layers that each of them has
    around: float  # what its layers read, and what norms keep
    begun: float = 0.0  # partial sums of row-parallel products, of the size of the sum, with selective recomputation


@dataclass(frozen=True)
class RankLayer:
    """One layer on one rank, per token of a micro-batch where it says so."""

    own: RankWeights  # its parameters
    shared: Mapping[str, RankWeights]  # parameters of modules that several blocks use, by name: a rank has them once
    matrices: tuple[Matrix, ...]  # its products
    other: float  # FLOPs per token of the forward pass that are no products with weights: attention and scans
    attends: bool  # whether these are softmax attention, where causal kernels compute half
    saved: Mapping[str, float]  # bytes kept per token for the backward pass, by mode of recomputation
    whole: float  # bytes that exist per token while the layer is computed
    expert_rows: float = 0.0  # bytes per token of the rows sent to experts, and the same back. 0 without experts
    state: float = 0.0  # numbers per sample that a recurrence carries, for context parallelism
    rows: int = 0  # elements of this rank's part of matrices whose rows ranks share
    gathered: int = 0  # elements of the largest matrix that is gathered for a product
    tensors: int = 0  # number of parameter tensors. Shared ones count in each block


class Shapes:
    """Layers of a configuration by place and cut, each built once.

    Args:
        config: resolved, with `model.vocab_size` and `training.global_batch_size`.
        ranks: of the run.
    """

    def __init__(self, config: Config, ranks: int) -> None:
        self.config, self.ranks, self.places = config, ranks, len(config.model.blocks) + 2
        self._layers: dict[tuple, RankLayer] = {}
        self._held: dict[tuple, list[list[int]]] = {}
        self._sends: dict[tuple, tuple[tuple[Call, int, int], ...]] = {}
        self.classes = [self._class(place) for place in range(self.places)]  # equal words for equal layers
        self.recurs = [False, *(block.recurrent for block in config.model.blocks), False]
        self._weights: dict[tuple, RankWeights] = {}
        self._saved = {mode: _saved(config, mode) for mode in ("none", "selective", "full")}

    @cached_property
    def teacher(self) -> Shapes | None:
        """Shapes of the teacher, whole on every stage. None without one.

        Raises:
            UserError: its checkpoint cannot be read.
        """
        objective = self.config.objective
        if objective.teacher is None or objective_of(self.config).teacher is None:
            return None
        update = {"model": teacher_config(objective.teacher).model, "objective": type(objective)()}
        return Shapes(self.config.model_copy(update=update), self.ranks)

    def _class(self, place: int) -> str:
        blocks, model = self.config.model.blocks, self.config.model
        if place == 0 or place == self.places - 1:
            return "embedding" if place == 0 else "head"
        block = blocks[place - 1]
        indexed = any(getattr(layer_class(model, kind), "indexed", False) for kind in block.kinds)
        if block.side or opens_core(model, place - 1):
            return f"{block} {place}"
        length = self.config.training.sequence_length
        return f"{block} {block_counts(model, block, length, place - 1).parameters}" if indexed else str(block)

    def held(self, config: Config) -> list[list[int]]:
        """Places of [embedding, blocks..., head] that each rank of the pipeline has, of a candidate's configuration."""
        parallel = config.parallel
        key = (str(ranks_of_stages(parallel)), str(parallel.pipeline_split))
        if key not in self._held:
            self._held[key] = [[] for _ in range(parallel.pipeline)]
            for place, rank in enumerate(rank_of(config)):
                self._held[key][rank].append(place)
        return self._held[key]

    def passes(self, place: int) -> Passes:
        """How often a step runs the layer at a place, on average."""
        return expected_passes(self.config.model.recurrence) if self.recurs[place] else Passes(0, 1)

    def recomputes(self, config: Config, choice: Candidate, place: int) -> str:
        """Recomputation mode of a layer: full recomputation may skip blocks (`activation_checkpointing.every`)."""
        block, every = place - 1, config.training.activation_checkpointing.every
        left_out = choice.recompute == "full" and 0 <= block < self.places - 2 and block % every
        return "none" if left_out else choice.recompute

    def weights(self, choice: Candidate, places: Sequence[int]) -> RankWeights:
        """Parameters of the layers of a stage on one rank. Shared ones count once."""
        key = (tuple(places), *choice.cuts, choice.pipeline > 1)
        if key not in self._weights:
            total, shared = RankWeights(), dict[str, RankWeights]()
            for place in places:
                layer = self.layer(place, choice)
                total += layer.own
                shared |= layer.shared
            self._weights[key] = sum(shared.values(), total)
        return self._weights[key]

    def layer(self, place: int, choice: Candidate) -> RankLayer:
        """The layer at a place of [embedding, blocks..., head], as a rank of the candidate's layout has it."""
        key = (self.classes[place], *choice.cuts, place in (0, self.places - 1) and choice.pipeline > 1)
        if key not in self._layers:
            self._layers[key] = self._build(place, choice)
        return self._layers[key]

    def sends(self, place: int, choice: Candidate, config: Config) -> tuple[tuple[Call, int, int], ...]:
        """Calls on the tensor axis for one micro-batch."""
        key = (
            self.classes[place],
            choice.tensor,
            choice.sequence,
            choice.micro_batch,
            self.recomputes(config, choice, place),
            choice.context,
            choice.depth,
            choice.columns,
            config.training.loss_chunk,
        )
        if key not in self._sends:
            self._sends[key] = tuple(_sends(config, place, choice))
        return self._sends[key]

    def _build(self, place: int, choice: Candidate) -> RankLayer:
        mesh = Mesh.describe(layout_of(choice, self.ranks), 0)
        plan = ModelPlan(self.config, mesh, "meta", values=False)
        model, size = self.config.model, SIZES[self.config.precision.compute]
        length = self.config.training.sequence_length
        head = place == self.places - 1
        module: nn.Module
        if place == 0:
            counts, module = embedding_counts(model), plan.embedding()
        elif head:
            counts = head_counts(model, objective_of(self.config).scores) + multi_token_counts(model, length)
            module = plan.head(plan.tokens() if plan.head_embeds else None)
        else:
            counts, module = block_counts(model, model.blocks[place - 1], length, place - 1), plan.block(place - 1)
        top_k, experts = self.experts(place)
        own, shared, matrices, used = self._parameters(place, module, choice, top_k, experts)
        spread = [each for each in module.parameters() if is_spread(each)]
        shared_rows = [each.numel() for each in spread if choice.expert == 1 or shares_rows(each)]
        parts, cut, channels = self._cut(place, counts), choice.tensor, 1 if head else choice.columns
        passes = model.recurrence.backward if self.recurs[place] else 1
        saved = {
            mode: passes * self._on_rank(self._saved[mode][place] / passes, mode, parts, choice, channels) * size
            for mode in ("none", "selective", "full")
        }
        return RankLayer(
            own=own,
            shared=shared,
            matrices=matrices,
            other=max(0.0, counts.flops - 2 * used) / cut,
            attends=self._attends(place),
            saved=saved,
            whole=(parts.cut / cut + parts.whole + parts.around / channels) * size,
            expert_rows=top_k * model.hidden_size // channels * size if experts else 0.0,
            state=counts.memory / cut,
            rows=sum(shared_rows),
            gathered=choice.depth * max(shared_rows, default=0) if choice.depth > 1 else 0,
            tensors=sum(1 for _ in module.parameters()),
        )

    def experts(self, place: int) -> tuple[int, int]:
        """(experts of a token, experts) of a block, zeros without experts."""
        model = self.config.model
        if not 0 < place < self.places - 1:
            return 0, 0
        for kind in model.blocks[place - 1].kinds:
            options = options_of(model, kind)
            if experts := kind_of(model, kind).experts(options):
                return getattr(options, "top_k", 1), experts
        return 0, 0

    def _parameters(
        self, place: int, module: nn.Module, choice: Candidate, top_k: int, experts: int
    ) -> tuple[RankWeights, dict[str, RankWeights], tuple[Matrix, ...], float]:
        """(its own parameters, shared ones, products, elements of whole matrices that a token uses)."""
        own, shared, matrices, used = RankWeights(), dict[str, RankWeights](), [], 0.0
        prefix = f"layers.{place - 1}."
        tied = self.config.model.embedding.tied and choice.pipeline == 1
        for each in module.parameters():
            logical, count = logical_of(each), each.numel()
            if is_spread(each):
                mine = RankWeights(expert=count)
            else:
                mine = RankWeights(wide=count) if logical.keep_fp32 else RankWeights(low=count)
            if 0 < place < self.places - 1 and not logical.name.startswith(prefix):
                shared[logical.name] = mine
            elif not (tied and logical.role is Role.EMBEDDING and place == self.places - 1):  # one stage has it once
                own += mine
            product = logical.role in PRODUCTS or (place == self.places - 1 and logical.role is Role.EMBEDDING)
            if not product or each.ndim < 2:
                continue
            if logical.stacked and experts:
                spread = choice.expert if is_spread(each) else 1
                runs = choice.depth if is_spread(each) and spread == 1 else 1  # which a rank gathers
                matrices.append(Matrix(each.shape[1], each.shape[2], runs * each.shape[0], top_k * spread / experts))
                used += prod(logical.shape) * top_k / experts
            else:
                runs = max(choice.folded, choice.depth) if shares_rows(each) else 1
                matrices.append(Matrix(runs * each.shape[0], count // each.shape[0]))
                used += prod(logical.shape)
        return own, shared, tuple(matrices), used

    def _cut(self, place: int, counts: Counts) -> Kept:
        """Activations that a layer keeps without recomputation, by their sharding over tensor parallel ranks."""
        model, config = self.config.model, self.config
        if not 0 < place < self.places - 1:
            return Kept(0.0, 0.0, float(counts.activations))
        inner = Counts()
        for kind in model.blocks[place - 1].layers:
            layer: Any = layer_class(model, kind)
            index = (place - 1,) if getattr(layer, "indexed", False) else ()
            inner += layer.counts(model, options_of(model, kind), config.training.sequence_length, *index)
        whole, around = inner.whole + copies(config, inner), max(0, counts.activations - inner.activations)
        return Kept(inner.activations - inner.whole, whole, around, self._begun(place))

    def _begun(self, place: int) -> float:
        """`Kept.begun` of a block."""
        model = self.config.model
        try:
            parts = block_sends(model, model.blocks[place - 1], TensorAxis(2, False), place - 1)
        except NotPredicted:
            return 0.0
        return float(sum(event.width for _, events in parts for event in events if isinstance(event, Leave)))

    def _on_rank(self, saved: float, mode: str, parts: Kept, choice: Candidate, channels: int) -> float:
        """Elements per token that one tensor parallel rank keeps.

        Tensors inside of layers are sharded. Inputs of layers are whole on each rank: with sequence parallelism they
        are gathered and kept. Inputs of norms are whole, or sharded with the stream. Columns share channels of both."""
        cut = choice.tensor
        if choice.grid == 1:
            return saved
        if mode == "none":
            around = (saved - parts.cut - parts.whole) / channels
            return parts.cut / cut + parts.whole + (around / 2 * (1 + 1 / cut) if choice.sequence else around)
        width = self.config.model.hidden_size
        products = max(0, saved - width) if mode == "selective" else 0
        stream, begun = saved - products, min(products, parts.begun)
        return (products - begun) / cut + (begun + (stream / cut if choice.sequence else stream)) / channels

    def _attends(self, place: int) -> bool:
        """Attention to tokens that a layer chooses is a masked square, which no kernel halves or ranks share."""
        model = self.config.model
        mixers = model.blocks[place - 1].mixers if 0 < place < self.places - 1 else ()
        return any(kind_of(model, each).attends and kind_of(model, each).context == "attends" for each in mixers)


def _saved(config: Config, mode: str) -> list[int]:
    """Elements saved per token and layer in a mode of recomputation."""
    checkpointing = config.training.activation_checkpointing.model_copy(update={"mode": mode, "every": 1})
    training = config.training.model_copy(update={"activation_checkpointing": checkpointing})
    return [each.saved for each in layers(config.model_copy(update={"training": training}))]


def _sends(config: Config, place: int, choice: Candidate) -> Iterable[tuple[Call, int, int]]:
    """Messages of a layer on the tensor axis. Kinds without a formula count as two sums of the stream each way."""
    wire = config.parallel.communication.compress.tensor
    axis = TensorAxis(choice.tensor, choice.sequence, wire, choice.depth, choice.columns)
    try:
        return tensor_traffic(config, [place], axis)
    except NotPredicted:
        training, compute = config.training, config.precision.compute
        size = training.micro_batch_size * training.sequence_length * config.model.hidden_size * SIZES[compute]
        passes = 2 if choice.recompute == "none" else 3
        call = Call("forward", "", "tensor", choice.tensor, "all_reduce", compute)
        return Tally([(call, 2 * passes, 2 * passes * size)])
