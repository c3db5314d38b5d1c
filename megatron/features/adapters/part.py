"""Adapters in the engine: they are made before DeepSpeed sees the model, and the base's weights are read for them.

Adapters of linear layers, on each tensor parallel rank as the layer's own matrix is cut.

A layer whose matrix W is several ones, one below the other (keys and values, gate and up), has an A and a B for each.
With s the scale, the product of LoRA is W x + s B A x. DoRA has m (W x + s B A x) / n. There n are the lengths of the
rows of W + s B A, which count as constants in the backward pass.

    W cut by outputs   A whole, its gradient summed over the ranks. B and m are cut like W
    W cut by inputs    A cut like W. A's product is summed over the ranks, so that B and m see all of it
    W whole            all are whole

Shapes: N outputs and K inputs of this rank, P matrices, r rank."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose, sqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.checkpoint import Checkpoint, CheckpointError, Communicator, Fragment, FragmentSpec
from megatron.checkpoint.format.communicator import all_problems
from megatron.checkpoint.format.fragment import MASTER, WEIGHT
from megatron.checkpoint.read.logical import sha256
from megatron.checkpoint.read.reader import ADAPTERS, config_of
from megatron.config.problems import UserError
from megatron.config.registry import load
from megatron.engine.base import BaseEngine
from megatron.engine.part import EnginePart
from megatron.model.block import Block
from megatron.model.stack import ModelPlan
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import all_reduce, leave, sum_gradient
from megatron.parallel.layers.linear import ColumnLinear, PartialLinear, RowLinear, WholeLinear
from megatron.parallel.layers.parameters import ParameterFactory, logical_of
from megatron.parallel.layout.initial import ONES, ZEROS, Init
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.random import dropout, sequence_counters, site_key
from megatron.parallel.layout.shard import Growth, LogicalTensor, Role, Shard
from megatron.training.start.fetch import weights_of

from .options import AdapterSection, adapter_of, is_target

LINEARS = (ColumnLinear, RowLinear, WholeLinear, PartialLinear)  # of blocks
A, B, MAGNITUDE = "adapter.a", "adapter.b", "adapter.magnitude"  # ends of logical names


def is_adapter(name: str) -> bool:
    return name.endswith((A, B, MAGNITUDE)) and ".adapter." in name


def layer_of(name: str) -> str:
    """The linear layer of a tensor: of its adapter, or its own weight."""
    return name.removesuffix(".weight").partition(".adapter.")[0]


class Reading:
    """The stream that a layer reads now, with the keys of dropout."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    def before(self, _layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        """As a hook of layers."""
        self.stream = arguments[1]


@dataclass(frozen=True)
class Dropout:
    """Drops elements of what A reads, keyed by (seed, layer, sample, position, channel)."""

    make: ParameterFactory
    rate: float
    reading: Reading
    first: int  # channel of this rank
    width: int  # channels of all ranks
    cut: bool  # whether each rank has a part of the sequence

    def __call__(self, x: Tensor) -> Tensor:
        stream = self.reading.stream
        assert stream is not None  # a layer of a block reads it
        samples = stream.sample_numbers
        rows = x.reshape(samples.numel(), -1, x.shape[-1])  # mixtures of experts have flattened tokens
        tensor, length = self.make.mesh.tensor, rows.shape[1]
        places = self.make.context.places(length * (tensor.size if self.cut else 1), x.device) + stream.first
        if self.cut:
            places = places[tensor.rank * length : (tensor.rank + 1) * length]
        counters = sequence_counters(places, self.width)[:, self.first : self.first + x.shape[-1]]
        key = site_key(self.make.seed, self.make.prefix, "adapter")
        return dropout(rows, self.rate, key, samples, counters).reshape(x.shape)


class Adapter(nn.Module):
    """Adds the product of A and B to that of a linear layer.

    Args:
        make: with the logical name of the layer.
        linear: one of `LINEARS`, or a linear layer of another program.
        reading: None: dropout draws from torch's generator, as that program does.
        shared: each rank has a part of the gradient of a whole matrix.
    """

    def __init__(
        self,
        make: ParameterFactory,
        linear: Any,
        options: AdapterSection,
        reading: Reading | None,
        shared: bool = False,
    ) -> None:
        super().__init__()
        logical, mesh = logical_of(linear.weight), make.mesh
        (outputs, inputs), shard, r = logical.shape, logical.shard, options.rank
        parts, by_inputs = logical.matrices or (outputs,), shard is not None and shard.dim == 1
        column, some = isinstance(linear, ColumnLinear), isinstance(linear, (RowLinear, WholeLinear))
        self.scale, self.rank, self.mesh = options.scale, r, mesh
        self.sums_squares = by_inputs and mesh.tensor.size > 1
        self.sums_product = isinstance(linear, RowLinear)
        # Who sees part of the tokens, or gives part of the outputs, has part of a whole tensor's gradient.
        some = shared or (some and mesh.layout.sequence)
        self.partial_a = not by_inputs and (column or some)
        self.partial_b = some or isinstance(linear, PartialLinear) or (column and shard is None)
        rows = None if shard is None or by_inputs else Shard(0, shard.parts or parts, shard.unit)
        columns = Shard(1, None, shard.unit) if shard is not None and by_inputs else None
        at = (mesh.tensor.rank, mesh.tensor.size)
        self.sizes = parts if rows is None else tuple(span.length for span in rows.spans(outputs, *at))
        self.sizes = self.sizes if len(parts) > 1 else (sum(self.sizes),)
        given: Any = {"role": logical.role, "growth": Growth.OUTPUTS}
        start, fused = Init("uniform", 1 / sqrt(inputs)), (r,) * len(parts)
        self.a = make.parameter(A, (len(parts) * r, inputs), init=start, shard=columns, matrices=fused, **given)
        self.b = make.parameter(B, (outputs, r), init=ZEROS, shard=rows, matrices=parts, **given)
        self.magnitude: nn.Parameter | None = None
        if options.type == "dora":
            self.magnitude = make.parameter(
                MAGNITUDE, (outputs,), role=Role.NORM, init=ONES, shard=rows, keep_fp32=True
            )
        self.drop: Callable[[Tensor], Tensor] | None = None
        if options.dropout > 0.0 and reading is None:
            self.drop = nn.Dropout(options.dropout)
        elif options.dropout > 0.0:
            assert reading is not None
            first = columns.spans(inputs, *at)[0].start if columns else 0
            cut = mesh.layout.sequence and isinstance(linear, WholeLinear)
            self.drop = Dropout(make, options.dropout, reading, first, inputs, cut)

    def forward(self, x: Tensor, y: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """The adapted layer's product.

        Args:
            x: what the layer reads.
            y: its product, with the bias.
        """
        axis = self.mesh.tensor
        a = sum_gradient(self.a, axis) if self.partial_a else self.a
        b = sum_gradient(self.b, axis) if self.partial_b else self.b
        x = self.drop(x) if self.drop is not None and self.training else x
        h = F.linear(x, a)
        h = leave(h, self.mesh) if self.sums_product else h
        added = self.scale * self._of_parts(h, b)
        if self.magnitude is None:
            return y + added
        magnitude = sum_gradient(self.magnitude, axis) if self.partial_b else self.magnitude
        factor = magnitude / self.lengths(weight_NK)
        own = y if bias_N is None else y - bias_N
        return y + (factor - 1).to(y.dtype) * own + factor.to(y.dtype) * added

    def _of_parts(self, h: Tensor, b: Tensor) -> Tensor:
        """B's product, of each part with its own rows of A."""
        if len(self.sizes) == 1:
            return F.linear(h, b)
        products = zip(h.split(self.rank, -1), b.split(list(self.sizes)))
        return torch.cat([F.linear(own, rows) for own, rows in products], -1)

    @torch.no_grad()
    def lengths(self, weight_NK: Tensor) -> Tensor:
        """Of the rows of W + s B A, fp32 [N]."""
        squares = (at_least_fp32(weight_NK) + self.delta()).square().sum(1)
        return (all_reduce(squares, self.mesh.tensor) if self.sums_squares else squares).sqrt()

    def delta(self) -> Tensor:
        """s B A, fp32 [N, K]."""
        return delta_of(self.a, self.b, self.sizes, self.scale)


def delta_of(a_PrK: Tensor, b_Nr: Tensor, sizes: Sequence[int], scale: float) -> Tensor:
    """s B A of P matrices of these numbers of rows, one below the other: [N, K], in fp32 at least."""
    a, b = at_least_fp32(a_PrK), at_least_fp32(b_Nr)
    pairs = zip(b.split(list(sizes)), a.split(b.shape[1]))
    return torch.cat([rows @ own for rows, own in pairs]) * scale


def adapt(module: nn.Module, plan: ModelPlan) -> dict[str, nn.Module]:
    """Give the linear layers that the run names an adapter, and freeze all else. Layers by logical name."""
    options, reading = adapter_of(plan.config), Reading()
    whole_model: Any = load(plan.whole) if plan.whole else ()
    module.requires_grad_(False)
    found: dict[str, nn.Module] = {}
    for each in [*module.modules()]:
        if isinstance(each, whole_model):
            found |= _adapt_whole(each, plan)
        for _, layer in each.turning() if isinstance(each, Block) else ():
            if options.dropout > 0.0:
                layer.register_forward_pre_hook(reading.before)
            for linear in [part for part in layer.modules() if type(part) in LINEARS]:
                logical = logical_of(cast(Tensor, linear.weight))
                name, known = layer_of(logical.name), logical.role in (Role.HIDDEN, Role.OUTPUT)
                if known and name not in found and is_target(name, options.targets):
                    found[name] = linear
                    linear.adapter = _adapter(plan, name, linear, reading)
                    linear.register_forward_hook(_adapted)
                    if isinstance(linear, ColumnLinear):
                        linear.matrix = partial(_matrix, linear)  # type: ignore[method-assign]
    return found


def _adapt_whole(model: Any, plan: ModelPlan) -> dict[str, nn.Module]:
    """`adapt` of a kind that is a whole model. Its sharded layers call their adapters themselves."""
    found: dict[str, nn.Module] = {}
    for name, linear in model.linears().items():
        if is_target(name, adapter_of(plan.config).targets):
            found[name] = linear
            linear.adapter = _adapter(plan, name, linear, None, name in model.shared)
            if not getattr(linear, "adapts", False):
                # Before the hooks of a cut, which add up the gradients of some outputs.
                linear.register_forward_hook(_adapted, prepend=True)
    return found


def _adapter(plan: ModelPlan, name: str, linear: Any, reading: Reading | None, shared: bool = False) -> Adapter:
    # Their checkpoint may be one of the base, which has no values of them.
    return Adapter(replace(plan.factory(name), values=True), linear, adapter_of(plan.config), reading, shared)


def _adapted(linear: Any, arguments: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return linear.adapter(arguments[0], y, linear.weight, getattr(linear, "bias", None))


def _matrix(linear: Any) -> Tensor:
    """Of a layer whose matrix others multiply with, the sum with the adapter's."""
    adapter, weight = linear.adapter, linear.weight
    total = at_least_fp32(weight) + adapter.delta()
    if adapter.magnitude is not None:
        total = total * (adapter.magnitude / adapter.lengths(weight)).unsqueeze(1)
    return total.to(weight.dtype)


def hash_of(checkpoint: Checkpoint, communicator: Communicator) -> str:
    """SHA-256 of all weights, by name: the same for whatever layout wrote them. The ranks share the work."""
    names = sorted(name for name in checkpoint.tensors if checkpoint.has_weights(name))
    own = {name: sha256(checkpoint, name, WEIGHT) for name in names[communicator.rank :: communicator.size]}
    found = {name: digest for each in communicator.gather(own) for name, digest in each.items()}
    return hashlib.sha256("\n".join(f"{name} {found[name]}" for name in names).encode()).hexdigest()


def fill_lengths(magnitudes: Iterable[Fragment], base: Checkpoint, dtype: torch.dtype) -> None:
    """Set fragments of DoRA's magnitudes to the lengths of the base's rows.

    They are sums of the same numbers in the same order on every layout.

    Args:
        dtype: of the weights in the run, whose rows are meant.
    """
    for each in magnitudes:
        weight = base.tensors.get(f"{layer_of(each.tensor.name)}.weight")
        if weight is None:
            raise CheckpointError(base.path, f"it has no weights of {layer_of(each.tensor.name)}")
        rows = whole(base, weight).to(dtype).double()
        own = [rows[span.start : span.stop] for span in each.tensor.spans(each.tensor_rank, each.tensor_ranks)[0]]
        lengths = torch.cat(own)[each.start : each.start + each.data.numel()].square().sum(1).sqrt()
        each.data.copy_(lengths)


def whole(checkpoint: Checkpoint, tensor: LogicalTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A whole logical tensor, in the type that it is stored in, or another."""
    return checkpoint.read(FragmentSpec.whole(tensor, WEIGHT), dtype).data.view(tensor.shape)


def adapted_layers(adapters: Checkpoint) -> Iterator[str]:
    """Names of the linear layers that a checkpoint has adapters for."""
    yield from (layer_of(name) for name in adapters.tensors if name.endswith(A) and adapters.has_weights(name))


def merged(base: Checkpoint, adapters: Checkpoint, layer: str, options: AdapterSection) -> torch.Tensor:
    """The weight of a layer with its adapter, [N, K] in fp32: W + s B A, with its rows of DoRA's lengths."""
    tensor = base.tensors[f"{layer}.weight"]
    a, b = (whole(adapters, adapters.tensors[f"{layer}.{end}"], torch.float32) for end in (A, B))
    total = whole(base, tensor).float() + delta_of(a, b, tensor.matrices or (tensor.shape[0],), options.scale)
    name = f"{layer}.{MAGNITUDE}"
    if name not in adapters.tensors:
        return total
    lengths = whole(adapters, adapters.tensors[name], torch.float32)
    return total * (lengths / total.square().sum(1).sqrt()).unsqueeze(1)


class Adapters(EnginePart):
    """Adapts the layers, and keeps with each checkpoint which weights they belong to."""

    base: str | None = None  # hash of the weights under the adapters. None until they were read.

    def module_made(self, engine: BaseEngine, module: nn.Module) -> None:
        lacks = [] if adapt(module, engine.plan) else [f"rank {engine.mesh.pipeline.rank} of the pipeline"]
        if found := all_problems(engine.communicator, lacks):
            raise UserError(
                f"adapter.targets must name a linear layer of each rank of a pipeline, and {' and '.join(found)} has "
                "none: name more layers, or change parallel.pipeline or parallel.pipeline_split"
            )

    def attach(self, engine: BaseEngine) -> None:
        self._engine, self._options = engine, adapter_of(engine.config)

    def state(self) -> dict[str, Any]:
        return {"base": self.base}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read the base, and in a new run what its adapters begin with.

        Raises:
            CheckpointError: on every rank. The base is missing, or is not the one that the adapters were trained on.
        """
        if self.base is not None and state.get("base") == self.base:
            return  # it goes back to a checkpoint of its own
        talk = self._engine.communicator
        base = self._open(self._engine.config.checkpoint.initialize_from, "checkpoint.initialize_from", talk)
        self.base = hash_of(base, talk)
        if state:
            refuse_other_base(state.get("base"), self.base, base)
        buffers = [each for each in self._engine.state.masters() if not is_adapter(each.tensor.name)]
        targets = [*self._engine.state.frozen(), *buffers]
        base.check([each.spec for each in targets], communicator=talk, states={MASTER, WEIGHT})
        base.read_into(targets, cast={MASTER, WEIGHT}, communicator=talk)
        if not state:
            self._begin(base, self.base, talk)

    def _begin(self, base: Checkpoint, known: str, talk: Communicator) -> None:
        """Give the adapters of a new run the values that they begin with."""
        masters = [each for each in self._engine.state.masters() if is_adapter(each.tensor.name)]
        if self._options.initialize_from is None:
            fill_lengths(
                [each for each in masters if each.tensor.name.endswith(MAGNITUDE)],
                base,
                self._engine.plan.factory("").dtype,
            )
            return
        found = self._open(self._options.initialize_from, "adapter.initialize_from", talk)
        kept = found.meta.extra.get(ADAPTERS)
        if not isinstance(kept, dict):
            raise CheckpointError(found.path, "it has no adapters, and adapter.initialize_from must name some")
        refuse_other_base(kept.get("base"), known, base)
        own = adapter_of(config_of(found, whole=False))
        alpha = self._options.alpha * own.scale / self._options.scale
        if not isclose(alpha, self._options.alpha, rel_tol=1e-6):
            raise CheckpointError(found.path, f"adapter.alpha must be {alpha}, which its adapters were trained with")
        found.check([each.spec for each in masters], communicator=talk, states={MASTER, WEIGHT})
        found.read_into(masters, cast={MASTER, WEIGHT}, communicator=talk)

    def _open(self, where: str | None, key: str, talk: Communicator) -> Checkpoint:
        if where is None:
            raise CheckpointError(key, "it must be given with adapters")
        return weights_of(where, key, self._engine.config, talk)


def refuse_other_base(known: object, found: str, base: Checkpoint) -> None:
    """Raise unless adapters belong to these weights."""
    if known != found:
        other = "of no known weights" if known is None else f"of other weights (hash {str(known):.12})"
        raise CheckpointError(
            base.path,
            f"the adapters are {other}, and these have the hash {found:.12}. checkpoint.initialize_from must name the "
            "weights that they were trained on",
        )
