"""Tensor parallel slices of a class of transformers, by its own plan: our sharded layers take the places of its own.

A plan names modules or parameters, with a style for each. All others stay whole on every rank."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from megatron.parallel.layers.collectives import all_reduce, enter, gather_channels, leave, split_channels
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory, logical_of
from megatron.parallel.layout.initial import ZEROS
from megatron.parallel.layout.mesh import Axis, Mesh
from megatron.parallel.layout.shard import Shard

from .facts import FactsError
from .outline import stack_of
from .probe import output_of

TENSOR = "parallel.tensor"
FIX = "use parallel.tensor: 1. ZeRO splits the states of any model"
THIRDS = "three_colwise"  # queries, keys and values in one matrix, one below the other
COLUMNS = ("colwise", "packed_colwise", "colwise_gather_output", "colwise_rep", THIRDS)
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT = ("rowwise_split_input", "rowwise_rep")
WHOLE_WITH_SUM = "replicated_with_grad_allreduce"
OTHERS = (
    *(WHOLE_WITH_SUM, "moe_tp_experts", "moe_identity_expert", "all_reduce", "mla_kv_a_proj"),
    *("local_params", "replicate", "embedding_rowwise", "embedding_colwise"),
)
# Linear layers of blocks by common names, for a class without a plan. The comparison with the whole class decides.
_ATTENTION = r"(self|attn|attention)"
COMMON = (
    (rf"{_ATTENTION}\.(q_proj|k_proj|v_proj|query|key|value|Wq|Wk|Wv)(\.linear)?", "colwise"),
    (rf"{_ATTENTION}\.query_key_value", "colwise"),  # heads one below the other, each with query, key and value
    (rf"{_ATTENTION}\.(c_attn|Wqkv)", THIRDS),
    (r"(fc1|fc_in|c_fc|gate_proj|up_proj|Wi|intermediate\.dense|dense_h_to_4h)", "colwise"),
    (rf"({_ATTENTION}|attention\.output)\.(o_proj|out_proj|dense|c_proj|Wo)(\.linear)?", "rowwise"),
    (r"(fc2|fc_out|mlp\.(c_proj|Wo)|down_proj|\d+\.output\.dense|dense_4h_to_h)", "rowwise"),
)
# Settings of a class that count heads, and attributes of modules that do. Each rank has its share of them.
HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_head", "n_heads", "n_kv_heads")
WIDTHS = ("all_head_size", "split_size", "embed_dim")
OF_HEADS = ("alibi", "position_bias")  # arguments with a part for each head of each sample


@dataclass
class Cuts:
    """The styles of a plan for a class.

    Attributes:
        shards: of parameters, by name.
        styles: of modules and parameters, by name.
        head, table: names of the output layer and of the token embedding.
    """

    head: str
    table: str
    shards: dict[str, Shard] = field(default_factory=dict)
    styles: dict[str, str] = field(default_factory=dict)


def refused(model: nn.Module, what: str) -> FactsError:
    return FactsError(TENSOR, f"must be 1: {type(model).__name__} {what}", FIX)


def cuts_of(model: PreTrainedModel) -> Cuts:
    """The cuts of a class, which may be without values.

    Raises:
        FactsError: it has no plan, or one that names what is unknown here.
    """
    plan = {name: style for name, style in (model.tp_plan or {}).items()}
    modules = {id(each): name for name, each in model.named_modules()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = Cuts(modules[id(output_of(model))], modules.get(id(model.get_input_embeddings()), ""))
    every = {**dict(model.named_modules()), **parameters}
    for pattern, style in plan.items():
        written = re.compile(re.escape(pattern).replace(r"\*", "[0-9]+"))
        for name in filter(written.fullmatch, every):
            if name not in (found.head, found.table) and found.styles.setdefault(name, style) != style:
                raise refused(model, f"has a plan that cuts {name} twice: {found.styles[name]}, and {style}")
    if not {*found.styles.values()} & {*COLUMNS, *ROWS}:
        found.styles = _common(model)
    if not found.styles:
        raise refused(model, "has no plan that cuts it (base_model_tp_plan), nor linear layers of common names")
    for name, style in found.styles.items():
        before = dict(found.shards)
        _add(model, found, name, every[name], style)
        for each in before:
            if before[each] != found.shards[each]:
                raise refused(model, f"has a plan that cuts {each} twice: as a parameter, and with its layer")
    _add_heads(model, found)
    for layer in (found.head, found.table):
        for name, each in parameters.items():
            if layer and name.rpartition(".")[0] == layer and isinstance(each, nn.Parameter):
                found.shards[name] = Shard(0)
    for name, each in parameters.items():  # parameters with several names
        other = next((found.shards[n] for n, p in parameters.items() if p is each and n in found.shards), None)
        if other is not None:
            found.shards[name] = other
    return found


def _common(model: PreTrainedModel) -> dict[str, str]:
    """Styles by the names of linear layers in blocks."""
    name, _ = stack_of(model)
    linear = {each: module for each, module in model.named_modules() if _is_linear(module)}
    styles = ((each, style) for each in linear for pattern, style in COMMON if re.search(rf"[._]{pattern}$", each))
    found = {each: style for each, style in styles if name and each.startswith(f"{name}.")}
    rows = {each.rpartition(".")[0]: linear[each] for each, style in found.items() if style in ROWS}
    for each, style in found.items():
        after = rows.get(each.rpartition(".")[0])
        if style == "colwise" and after is not None and _sizes(linear[each])[0] == 2 * _sizes(after)[1]:
            found[each] = "packed_colwise"  # a gate, and what it gates
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer. Conv1D has a matrix [inputs, outputs]."""
    outputs, inputs = cast(Tensor, layer.weight).shape
    return (inputs, outputs) if isinstance(layer, Conv1D) else (outputs, inputs)


def _add(model: PreTrainedModel, found: Cuts, name: str, each: nn.Module | nn.Parameter, style: str) -> None:
    """The shards that a style gives a module or a parameter."""
    if style not in (*COLUMNS, *ROWS, *OTHERS):
        raise refused(model, f"has a style of its plan for {name} that is unknown here: {style}")
    if style in OTHERS:
        return
    if isinstance(each, nn.Module):
        if not _is_linear(each):
            raise refused(model, f"has a plan for {name} ({style}), which is no linear layer")
        layer = cast(nn.Linear, each)
        if style == THIRDS and _sizes(layer)[0] % 3:
            raise refused(model, f"has fewer keys than queries in {name}, and no plan that cuts it")
        found.shards[f"{name}.weight"] = _shard(layer.weight, style, isinstance(layer, Conv1D))
        if layer.bias is not None and style in COLUMNS:
            found.shards[f"{name}.bias"] = _shard(layer.bias, style)
    elif style in COLUMNS or each.ndim > 1:
        found.shards[name] = _shard(each, style)


def _add_heads(model: PreTrainedModel, found: Cuts) -> None:
    """Vectors with a number for each head, next to layers that are cut by heads."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    parted = {*COLUMNS} - {*GATHERED}
    cut_by_heads = {name.rpartition(".")[0] for name, style in found.styles.items() if style in parted}
    for parent in cut_by_heads:
        for name, each in model.get_submodule(parent).named_parameters(recurse=False):
            if each.shape == (heads,):
                found.shards.setdefault(f"{parent}.{name}", Shard(0))


def _shard(parameter: Tensor, style: str, turned: bool = False) -> Shard:
    """
    Args:
        turned: the matrix is [inputs, outputs].
    """
    dim = max(0, parameter.ndim - (2 if (style in COLUMNS) != turned else 1))
    size, count = parameter.shape[dim], 3 if style == THIRDS else 2
    parts = (*[size // count] * (count - 1), size - size // count * (count - 1))
    return Shard(dim, parts if style == THIRDS or style.startswith("packed") else None)


def sizes_of(model: PreTrainedModel, cuts: Cuts) -> dict[str, int]:
    """Numbers that the size of the tensor axis must divide, by name. Vocabularies are cut anywhere."""
    settings = model.config.get_text_config()
    heads = {name: getattr(settings, name, None) for name in HEADS}
    found = {name: each for name, each in heads.items() if isinstance(each, int)}
    ends = (f"{cuts.head}.", f"{cuts.table}.")
    for name, parameter in model.named_parameters():
        shard = cuts.shards.get(name)
        if shard is not None and not name.startswith(ends):
            found[re.sub(r"\.\d+\.", ".*.", name)] = (shard.parts or (parameter.shape[shard.dim],))[0]
    return found


class Columns(ColumnLinear):
    """In the place of a linear layer with whole inputs.

    Args:
        gathers: every rank gets all outputs.

    Attributes:
        adapts: it calls a part `adapter` itself, with (inputs, outputs, matrix, bias).
    """

    adapts = True
    adapter: Any

    def __init__(self, make: ParameterFactory, layer: nn.Module, parts: tuple[int, ...], gathers: bool) -> None:
        self.out_features, self.in_features = _sizes(layer)
        super().__init__(make, self.in_features, parts, init=ZEROS, bias=layer.bias is not None, folds=False)
        self.mesh, self.gathers, self.turned = make.mesh, gathers, isinstance(layer, Conv1D)

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.mesh)
        y = super().forward(x)
        y = self.adapter(x, y, *self.used()) if "adapter" in self._modules else y
        return gather_channels(y, self.axis) if self.gathers else y

    def used(self) -> tuple[Tensor, Tensor | None]:
        return (self.weight.T if self.turned else self.weight), self.bias


class Rows(RowLinear):
    """In the place of a linear layer with inputs that the ranks share.

    Args:
        splits: inputs are whole.
    """

    adapts = True  # as `Columns`
    adapter: Any

    def __init__(self, make: ParameterFactory, layer: nn.Module, splits: bool) -> None:
        self.out_features, self.in_features = _sizes(layer)
        super().__init__(make, self.in_features, self.out_features, init=ZEROS, bias=layer.bias is not None)
        self.splits, self.turned = splits, isinstance(layer, Conv1D)

    def forward(self, x: Tensor) -> Tensor:
        x = split_channels(x, self.mesh.tensor) if self.splits else x
        if not self.turned:
            y = super().forward(x)
            return self.adapter(x, y, self.weight, self.bias) if "adapter" in self._modules else y
        y = leave(nn.functional.linear(x, self.weight.T), self.mesh)
        return y if self.bias is None else y + self.bias


def cut(model: PreTrainedModel, layer: nn.Module, cuts: Cuts, make: Callable[[str], ParameterFactory]) -> None:
    """Keep this rank's part of the class. Its parameters have their marks.

    Args:
        layer: the output layer, which need not be in the class any more.
    """
    mesh = make("").mesh
    places = [*model.modules(), layer]
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in places:
        for name, parameter in module._parameters.items():
            if parameter is not None and logical_of(parameter).shard is not None:
                module._parameters[name] = made.setdefault(parameter, _local(parameter, mesh.tensor))
    modules = dict(model.named_modules())
    for name, style in cuts.styles.items():
        each = modules.get(name)
        if each is None:  # a parameter, or of another stage
            if style == WHOLE_WITH_SUM:
                for parameter in (p for n, p in model.named_parameters() if n == name):
                    partial_gradient(parameter, mesh.tensor)
        elif style in (*COLUMNS, *ROWS) and _is_linear(each):
            new = _linear(each, style, make(name))
            new.weight, new.bias = each.weight, each.bias
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new)
            if style in COLUMNS and style not in GATHERED:
                _share_heads(model.get_submodule(parent), mesh.tensor)
        elif isinstance(each, nn.Module):
            _connect(each, style, mesh, getattr(model.config.get_text_config(), "qk_rope_head_dim", 0))
    table = modules.get(cuts.table)
    if table is not None and "weight" in table._parameters:
        _cut_table(table, mesh)


def _linear(layer: nn.Module, style: str, make: ParameterFactory) -> Any:
    """Our layer in the place of another one, with parameters that its builder replaces."""
    if style in ROWS:
        return Rows(make, layer, style in SPLIT)
    parts = logical_of(cast(Tensor, layer.weight)).shard
    sizes = (parts.parts if parts else None) or (_sizes(layer)[0],)
    return Columns(make, layer, sizes, style in GATHERED)


def _local(whole: nn.Parameter, axis: Axis) -> nn.Parameter:
    """This rank's part of a parameter, with its marks."""
    without = whole.untyped_storage().nbytes() == whole.element_size()  # of a rank that gets its values from another
    part = part_of(whole.data.to("meta") if without else whole.data, whole, axis)
    new = nn.Parameter(one(part.shape, part.dtype) if without else part, whole.requires_grad)
    marks: Any = new
    marks.logical, marks.cut = logical_of(whole), (axis.rank, axis.size)
    # DeepSpeed counts parameters without this mark once per tensor parallel group in the gradient norm.
    marks.model_parallel = marks.tensor_model_parallel = True
    return new


def one(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape with the memory of one element."""
    return torch.zeros((), dtype=dtype).expand(shape)


def part_of(values: Tensor, parameter: Tensor, axis: Axis) -> Tensor:
    """This rank's part of values of the whole tensor of a parameter."""
    shard = logical_of(parameter).shard
    if shard is None:
        return values
    spans = shard.spans(values.shape[shard.dim], axis.rank, axis.size)
    return torch.cat([values.narrow(shard.dim, each.start, each.length) for each in spans], shard.dim)


def partial_gradient(parameter: nn.Parameter, axis: Axis) -> None:
    """Sum the gradient of a parameter, which each rank uses for its part of a layer."""
    parameter.register_hook(lambda gradient: all_reduce(gradient.clone(), axis))


def _share_heads(module: nn.Module, axis: Axis) -> None:
    """Divide the numbers of heads in a module, and cut its arguments that have a part for each head. Once."""
    if hasattr(module, "_ranks_of_heads"):
        return
    vars(module)["_ranks_of_heads"] = axis.size
    heads = next((vars(module)[name] for name in HEADS if isinstance(vars(module).get(name), int)), 0)
    for name in (*HEADS, *WIDTHS):
        value = vars(module).get(name)
        if isinstance(value, int) and value % axis.size == 0:
            setattr(module, name, value // axis.size)

    def cut(_: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = {name: _of_heads(more[name], heads, axis) for name in OF_HEADS if isinstance(more.get(name), Tensor)}
        return args, {**more, **own}

    module.register_forward_pre_hook(cut, with_kwargs=True)


def _of_heads(x: Tensor, heads: int, axis: Axis) -> Tensor:
    """This rank's heads of [batch * heads, ...]."""
    if not heads or x.shape[0] % heads:
        return x
    return x.unflatten(0, (-1, heads)).chunk(axis.size, 1)[axis.rank].flatten(0, 1)


def _connect(module: nn.Module, style: str, mesh: Mesh, rope: int) -> None:
    """The sums at the ends of a module that is not cut itself.

    Args:
        rope: last outputs of latent attention's first projection, which are keys of all heads.
    """

    def experts(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(enter(x, mesh) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)

    def summed(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return leave(output, mesh)

    if style == "moe_tp_experts":
        module.register_forward_pre_hook(experts)
    if style in ("moe_tp_experts", "all_reduce"):
        module.register_forward_hook(summed)
    if style == "moe_identity_expert":
        module.register_forward_pre_hook(lambda _, args: (args[0] / mesh.tensor.size, *args[1:]))
    if style == WHOLE_WITH_SUM:
        for parameter in module.parameters():
            partial_gradient(parameter, mesh.tensor)
    if style == "mla_kv_a_proj":
        # The other outputs go through a linear layer that is cut, and it sums their gradient.
        module.register_forward_hook(lambda _, args, y: torch.cat([y[..., :-rope], enter(y[..., -rope:], mesh)], -1))


def _cut_table(table: nn.Module, mesh: Mesh) -> None:
    """Look up this rank's rows of the token embedding, and sum over the ranks."""
    rows = logical_of(cast(Tensor, table.weight)).shape[0]
    (span,) = Shard(0).spans(rows, mesh.tensor.rank, mesh.tensor.size)
    foreign: list[Tensor] = []
    padding = getattr(table, "padding_idx", None)
    if padding is not None:
        vars(table)["padding_idx"] = padding - span.start if span.start <= padding < span.stop else None

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        local = args[0] - span.start
        foreign.append((local < 0) | (local >= span.length))
        return (local.masked_fill(foreign[-1], 0), *args[1:])

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return leave(output.masked_fill(foreign.pop().unsqueeze(-1), 0), mesh)

    table.register_forward_pre_hook(before)
    table.register_forward_hook(after)
